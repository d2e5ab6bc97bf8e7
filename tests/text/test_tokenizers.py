"""Tokenizers and stored datasets as they are loaded."""

import json

import pytest
from rows import SPECIAL
from transformers import AlbertTokenizer

from common.console import UserError
from finetune_mlm import load_folder
from text.instances import TEXT
from text.stored import load_tokenized_dataset
from text.tokenizers import load_tokenizer, tokenizer_fingerprint


def test_missing_tokenizer_names_command(tmp_path, tokenizer):
    for load in (
        lambda: load_tokenizer(tmp_path / "none"),
        lambda: load_tokenizer(tmp_path),
        lambda: load_tokenized_dataset(tmp_path / "none", tokenizer),
        lambda: load_tokenized_dataset(tmp_path, tokenizer),
    ):
        with pytest.raises(UserError, match="^[^\n]*python tokenize_wikitext103.py[^\n]*$"):
            load()
    with pytest.raises(UserError, match="--objective clm --dataset_path"):
        load_tokenized_dataset(tmp_path / "none", tokenizer, TEXT)
    with pytest.raises(UserError, match="python tokenize_wikitext103.py --objective clm"):
        load_tokenizer(tmp_path / "none", TEXT)


def test_tokenizer_without_special_tokens_is_refused(tmp_path):
    lacking = AlbertTokenizer(vocab=[(token, 0.0) for token in SPECIAL], mask_token=None)
    lacking.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="no mask token"):
        load_tokenizer(tmp_path)


def test_tokenizer_code_is_not_run(tmp_path, tokenizer, monkeypatch):
    """transformers would ask, and run the code after `y`."""
    monkeypatch.setattr("builtins.input", lambda question: "y")
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'it_ran')!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for load in (load_tokenizer, lambda path: load_folder(path, f"--checkpoint {path}", "give another")):
        with pytest.raises(UserError, match=r"^[^\n]*custom code[^\n]*not run[^\n]*$"):
            load(tmp_path)
        # also next to a model with custom code
        (tmp_path / "config.json").write_text('{"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}')
    assert not (tmp_path / "it_ran").exists()


def test_wrong_tokenizer_folder_names_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for wrong in ("data/tokeniser", "./tokenizer", "/no/such/folder"):
        with pytest.raises(UserError, match=f"^no tokenizer in {wrong}, which is not a folder: make one with "):
            load_tokenizer(wrong)
    # this may also be a name on the Hub
    monkeypatch.setattr("common.hub.is_reachable", lambda _: False)
    with pytest.raises(UserError, match="^cannot load the tokenizer tokeniser, which is not a folder here, from the "):
        load_tokenizer("tokeniser")


def test_deeply_nested_tokenizer_is_one_line(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"a":' + 100_000 * "[" + 100_000 * "]" + "}")
    with pytest.raises(UserError, match="holds no readable tokenizer"):
        load_tokenizer(tmp_path)


def test_fingerprint_differs_between_tokenizers(tmp_path, tokenizer):
    vocabulary = [(token, 0.0) for token in SPECIAL] + [(f"▁{c}", -3.0) for c in "abcdeABCDEMRmr"] + [("▁déjà", -3.0)]
    variants = [tokenizer, AlbertTokenizer(vocab=vocabulary), AlbertTokenizer(vocab=vocabulary[:-1])]
    variants += [AlbertTokenizer(vocab=vocabulary, **it) for it in (dict(do_lower_case=False), dict(keep_accents=True))]
    fingerprints = [tokenizer_fingerprint(variant) for variant in variants]
    assert len(set(fingerprints)) == len(variants)
    for number, variant in enumerate(variants):
        variant.save_pretrained(tmp_path / str(number))
        assert tokenizer_fingerprint(load_tokenizer(tmp_path / str(number))) == fingerprints[number]
