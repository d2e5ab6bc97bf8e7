"""Edit me: sample texts, which each evaluation logs and shows on the status page.

Causal models continue PROMPTS, and chat models answer them. Masked models fill the blank in SENTENCES.
"""

import logging

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.console import first_line
from experiment.objectives import compute_logits
from models.build import find_longest_sequence
from text.documents import find_begin_token

logger = logging.getLogger("trainer")

PROMPTS = ("The captain was", "In the morning, she", "It is a truth universally acknowledged, that")
# from the sample corpus, but not from what the demo trains on
SENTENCES = (
    "Catherine ___ disappointed and vexed.",
    "He must have been dreadfully cruel ___ her!",
    "The weather added what it could ___ gloom.",
)
MAX_NEW_TOKENS = 24


@torch.no_grad()
def sample_texts(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return one text per prompt or sentence, the same ones for the same weights; none if the model makes none."""
    model.eval()
    try:
        if model.objective.is_causal:
            return [continue_prompt(model, tokenizer, prompt) for prompt in PROMPTS]
        return [fill_blank(model, tokenizer, sentence) for sentence in SENTENCES]
    except Exception as e:  # many types, of any model; the evaluation or the upload matters more
        logger.warning(f"no sample texts ({first_line(e)})")
        return []
    finally:
        model.train()


def continue_prompt(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """Return the prompt with a continuation, drawn at temperature 0.8 from the 40 most likely tokens."""
    if model.objective.kind.has_turns:
        question = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    begin = find_begin_token(tokenizer, model.objective.kind)
    ids = torch.tensor([begin + tokenizer(prompt, add_special_tokens=False)["input_ids"]], device=model.device)
    count = min(MAX_NEW_TOKENS, find_longest_sequence(model) - ids.shape[1])
    if count < 1:
        return prompt
    devices = [model.device] if model.device.type == "cuda" else []  # by default all GPUs, with a warning
    with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):  # each length would compile again
        torch.manual_seed(0)
        options = dict(do_sample=True, temperature=0.8, top_k=40, pad_token_id=tokenizer.pad_token_id or 0)
        text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **options)[0]
    return " ".join(tokenizer.decode(text, skip_special_tokens=True).split())


def fill_blank(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sentence: str) -> str:
    """Return the sentence with the most likely token in its blank, in brackets."""
    batch = dict(tokenizer(sentence.replace("___", tokenizer.mask_token), return_tensors="pt"))
    if batch["input_ids"].shape[1] > find_longest_sequence(model):
        return sentence
    batch["labelled_positions"] = (batch["input_ids"] == tokenizer.mask_token_id).flatten().nonzero()[:, 0]
    batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
    with torch.compiler.set_stance("force_eager"):
        _, logits = compute_logits(model, batch)
    return sentence.replace("___", f"[{tokenizer.decode(logits[0].argmax()).strip()}]")
