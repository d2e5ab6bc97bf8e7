"""Check the English of docstrings, comments and pages, and find missing docstrings: `make lint` runs this."""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from conventions import FILES
from processes import ROOT

START = r"(?:^|[.:;,(] |\b(?:and|but|or) )\W*"  # of a clause
# phrases, and how often each may occur in 10,000 words of docstrings and comments
PHRASES = {
    "who as a subject of its own": (rf"\b(?:whoever|whom)\b|{START}who\b", 1.0),
    "a clause that starts with what": (rf"{START}what\b", 8.0),
    "nobody, everybody": (r"\b(?:nobody|everybody)\b", 1.0),
    "where for if": (rf"{START}where\b", 3.0),
    "so many, so long": (r"\bso (?:many|long)\b", 1.0),
}
MAX_WORDS = 30  # of a sentence
MAX_LONG_IN_CODE, MAX_LONG_IN_PAGES = 3.0, 5.0  # percent of the sentences
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass
class Text:
    """A docstring, the comments on adjacent lines, or a paragraph of a page."""

    path: str
    line: int
    text: str

    def find(self, pattern: str) -> Iterator[str]:
        """Yield the lines in which the pattern occurs, with path and number."""
        for match in re.finditer(pattern, self.text, flags=re.MULTILINE | re.IGNORECASE):
            number = self.text.count("\n", 0, match.end())
            yield f"{self.path}:{self.line + number}: {self.text.splitlines()[number].strip()}"

    def list_sentences(self) -> list[str]:
        """Return the sentences. Indented commands do not count, and code between backquotes counts as one word."""
        text = re.sub(r"^    .*$", "", re.sub(r"`+[^`]*`+", "code", self.text), flags=re.MULTILINE)
        parts = re.split(r"(?<=[.!?])[*)\"]*\s|\n\s*\n|\n\s*(?=[-*] |:\w+)", text)
        return [" ".join(part.split()) for part in parts if part.strip()]


def read_code(path: Path) -> Iterator[Text]:
    """Yield the docstrings and comments of a module."""
    source, name = path.read_text(), str(path.relative_to(ROOT))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, *DEFINITIONS)) and (text := ast.get_docstring(node)):
            yield Text(name, node.body[0].lineno, text)
    block: Text | None = None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, text = token.start[0], token.string.lstrip("#: ")
            if block and token.line.lstrip().startswith("#") and line == block.line + block.text.count("\n") + 1:
                block.text += "\n" + text
            else:
                yield from [block] if block else []
                block = Text(name, line, text)
    yield from [block] if block else []


def read_page(path: Path) -> Iterator[Text]:
    """Yield the paragraphs of a Markdown page, without code, tables, tags and the targets of links."""
    text = re.sub(r"^```.*?^```$", lambda code: "\n" * code[0].count("\n"), path.read_text(), flags=re.M | re.S)
    text = re.sub(r"\]\([^)]*\)|<[^>\n]*>|^\|.*$", "", text, flags=re.MULTILINE)
    for paragraph in re.finditer(r"(?:^(?!    ).+\n?)+", text, flags=re.MULTILINE):
        line = text.count("\n", 0, paragraph.start()) + 1
        yield Text(str(path.relative_to(ROOT)), line, paragraph[0])


def find_undocumented(path: Path) -> Iterator[str]:
    """Yield the public functions, methods and classes without a docstring, except for setters and `main`."""
    tree = ast.parse(path.read_text())
    for owner in (tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))):
        for node in owner.body:
            if isinstance(node, DEFINITIONS) and not node.name.startswith("_") and node.name != "main":
                is_setter = any("setter" in ast.unparse(decorator) for decorator in node.decorator_list)
                if not is_setter and not ast.get_docstring(node):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"


def measure(area: str, texts: list[Text], max_long: float) -> Iterator[tuple[str, float, float, list[str]]]:
    """Yield the name of each rule, the rate in these texts, its limit, and the lines that count."""
    words = sum(len(text.text.split()) for text in texts)
    for name, (pattern, limit) in PHRASES.items():
        lines = [line for text in texts for line in text.find(pattern)]
        yield f"{area}: {name}, in 10,000 words", 10_000 * len(lines) / words, limit, lines
    sentences = [(text, sentence) for text in texts for sentence in text.list_sentences()]
    long = [f"{text.path}:{text.line}: {it}" for text, it in sentences if len(it.split()) > MAX_WORDS]
    yield f"{area}: sentences over {MAX_WORDS} words, in percent", 100 * len(long) / len(sentences), max_long, long


def check() -> bool:
    """Print each rate, with the lines that count if it is above its limit, and return whether all are below."""
    examples, tests = list(ROOT.glob("examples/*.py")), [*ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/*.py")]
    product, others = ([text for path in paths for text in read_code(path)] for paths in (FILES + examples, tests))
    pages = [text for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")) for text in read_page(path)]
    missing = [line for path in FILES for line in find_undocumented(path)]
    rules = [
        *measure("code", product, MAX_LONG_IN_CODE),
        *measure("code with tests", product + others, MAX_LONG_IN_CODE),
        *measure("pages", pages, MAX_LONG_IN_PAGES),
        ("missing docstrings", len(missing), 1, missing),
    ]
    for name, rate, limit, lines in rules:
        print(f"{name}: {rate:.1f}, below {limit:g}", *(lines if rate >= limit else ()), sep="\n    ")
    return all(rate < limit for _, rate, limit, _ in rules)


if __name__ == "__main__":
    sys.exit(not check())
