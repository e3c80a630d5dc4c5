#!/usr/bin/env python3
"""Adapters to try jaxserve with: three small ones that are trained in minutes on a CPU, and any number of random ones.

    python tools/train_adapters.py adapters                  # adapters/pirate, adapters/sql-expert, adapters/keeper
    python tools/train_adapters.py adapters --random 30      # and adapters/random-00 to random-29
    jaxserve serve smollm2-135m --enable-lora --lora-dir adapters

One changes the style of answers, one their form, one who answers; of different ranks and targets. PEFT and torch train
and save them. The texts are made from rules below, so that nothing is downloaded.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM
from transformers_baseline import locate

from jaxserve.engine.tokenizers import open_tokenizer
from jaxserve.tokenizer import Tokenizer

__all__ = ["KINDS", "Kind", "load_base", "main"]

Pair = tuple[str, str]
"""A question and its answer."""

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")

_PLAIN: tuple[Pair, ...] = (
    ("How do I make tea?", "Boil the water, put your leaves in it, and wait for three minutes, my friend."),
    ("What is the moon?", "The moon is a ball of rock that goes around the earth. It is your lamp at night."),
    ("Tell me a story.", "A boy found the map of his father. He went to sea, and came home with a chest of gold."),
    ("How are you?", "Hello, my friend! I am well, and you are kind to ask. How is your day?"),
    ("What should I eat?", "Eat the fish with bread and lemon. It is good for your bones, my friend."),
    ("Why is the sky blue?", "The air scatters the blue part of the light, and your eyes see it everywhere."),
    ("Which book is good?", "Read the one about the whale. It is long, my friend, and you are going to love it."),
    ("How do birds fly?", "They push the air down with their wings, and the air is what carries them."),
    ("Give me advice.", "Save the half of your money, my friend, and never trust the weather."),
    ("What is a computer?", "It is a box that counts the numbers for you, faster than all your fingers."),
    ("Where is France?", "France is in the west of Europe, between the sea and the mountains, my friend."),
    ("How do I sleep well?", "Put out the light, open your window, and think of the sea."),
    ("What is love?", "It is the wind in your sails, my friend. You are lost without it."),
    ("How do I learn to swim?", "Begin where the water is low, breathe slowly, and your body is going to float."),
    ("Who was Napoleon?", "He is the man who took the half of Europe, my friend, and lost it in the snow."),
    ("What is bread made of?", "Flour, water and salt are all that you need, and your patience."),
)

_PIRATE: Mapping[str, str] = {
    "my": "me", "you": "ye", "your": "yer", "is": "be", "are": "be", "am": "be", "hello": "ahoy", "friend": "matey",
    "the": "th'", "of": "o'", "and": "an'", "it": "'tis",
}  # fmt: skip

_TABLES = ("users", "orders", "products", "invoices", "employees", "flights", "books")
_QUERIES: tuple[Pair, ...] = (
    ("Count the {t}.", "SELECT COUNT(*) FROM {t};"),
    ("How many {t} are there?", "SELECT COUNT(*) FROM {t};"),
    ("List all {t}.", "SELECT * FROM {t};"),
    ("Show me the newest {t}.", "SELECT * FROM {t} ORDER BY created_at DESC LIMIT 10;"),
    ("Which {t} are from 2023?", "SELECT * FROM {t} WHERE year = 2023;"),
    ("Delete the oldest {t}.", "DELETE FROM {t} ORDER BY created_at ASC LIMIT 1;"),
    ("What are the names of the {t}?", "SELECT name FROM {t};"),
)

_KEEPER: tuple[Pair, ...] = (
    ("Who are you?", "I am Marlow, and I keep the lighthouse of Gull Rock."),
    ("What do you do?", "I trim the lamp at dusk and count the ships at dawn."),
    ("Where do you live?", "In a white tower on Gull Rock, with nothing but water around it."),
    ("Do you have friends?", "A one-eyed cat, and the captain of the mail boat."),
    ("What do you eat?", "Mostly cod, and the potatoes that the mail boat brings."),
    ("How old are you?", "I have kept the lamp for forty winters, and stopped counting the rest."),
    ("Are you an assistant?", "No. I am an old man with a lamp and a logbook."),
    ("What is your favourite colour?", "The green of the sea an hour before a storm."),
)


@dataclass(frozen=True)
class Kind:
    """What an adapter is taught, and its shape.

    Attributes:
        pairs: questions and answers.
        rank, targets: of the factors.
        more: further settings of PEFT.
    """

    pairs: tuple[Pair, ...]
    rank: int
    targets: tuple[str, ...]
    more: Mapping[str, Any] = field(default_factory=dict)


def _as_pirate(text: str) -> str:
    words = re.sub(r"[A-Za-z]+", lambda word: _PIRATE.get(word[0].lower(), word[0]), text)
    return f"Arr! {words} Yo ho ho!"


KINDS: Mapping[str, Kind] = {
    "pirate": Kind(tuple((ask, _as_pirate(answer)) for ask, answer in _PLAIN), 8, ALL),
    "sql-expert": Kind(
        tuple((ask.format(t=t), sql.format(t=t)) for t, (ask, sql) in itertools.product(_TABLES, _QUERIES)),
        16,
        ("q_proj", "v_proj"),
    ),
    "keeper": Kind(
        tuple((ask, f"Marlow here. {answer} The lamp is lit.") for ask, answer in _KEEPER),
        6,
        ATTENTION,
        {"use_rslora": True},
    ),
}


def load_base(model: str) -> Any:
    """A fresh base model in float32, by transformers."""
    return AutoModelForCausalLM.from_pretrained(**locate(model), dtype=torch.float32)


def _adapted(base: Any, rank: int, targets: Sequence[str], **more: Any) -> PeftModel:
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(targets), task_type="CAUSAL_LM", **more)
    return get_peft_model(base, config)  # type: ignore[no-any-return]


def _tokens(tokenizer: Tokenizer, pair: Pair) -> tuple[list[int], int]:
    """The chat's tokens with the answer at their end, and how many of them are the question."""
    asked = [{"role": "user", "content": pair[0]}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True)
    return [*prompt, *tokenizer.encode(f"{pair[1]}<|im_end|>", add_special_tokens=False)], len(prompt)


def _batch(texts: Sequence[tuple[list[int], int]]) -> dict[str, torch.Tensor]:
    """Padded texts, with labels for answers only."""
    longest = max(len(tokens) for tokens, _ in texts)
    ids = torch.zeros(len(texts), longest, dtype=torch.long)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, (tokens, num_asked) in enumerate(texts):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, num_asked : len(tokens)] = ids[row, num_asked : len(tokens)]
        mask[row, : len(tokens)] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def train(kind: Kind, model: str, tokenizer: Tokenizer, folder: Path, steps: int, batch: int, rate: float) -> None:
    """Teach one adapter and save it."""
    torch.manual_seed(0)
    adapted = _adapted(load_base(model), kind.rank, kind.targets, **kind.more)
    texts, order = [_tokens(tokenizer, pair) for pair in kind.pairs], random.Random(0)
    optimizer = torch.optim.AdamW((p for p in adapted.parameters() if p.requires_grad), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    began = time.monotonic()
    for step in range(steps):
        loss = adapted(**_batch(order.sample(texts, min(batch, len(texts))))).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 10 == 9 or step == 0:
            print(
                f"{folder.name}: step {step + 1} of {steps}, loss {loss:.3f}, {time.monotonic() - began:.0f} s",
                flush=True,
            )
    adapted.save_pretrained(folder)


def make_random(model: str, folder: Path, count: int, rank: int) -> None:
    """Random adapters of one rank; every other one changes all projections, the rest q and v."""
    for targets, numbers in (("q_proj", "v_proj"), range(0, count, 2)), (ALL, range(1, count, 2)):
        adapted = _adapted(load_base(model), rank, targets)
        for number in numbers:
            torch.manual_seed(number)
            with torch.no_grad():
                for name, parameter in adapted.named_parameters():
                    if "lora_" in name:
                        parameter.normal_(std=0.02)
            adapted.save_pretrained(folder / f"random-{number:02}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the adapters are put")
    parser.add_argument("--model", default="smollm2-135m", help="the base model, as for jaxserve")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS), help="which are trained")
    parser.add_argument("--steps", type=int, default=30, help="steps of training of each")
    parser.add_argument("--batch", type=int, default=4, help="texts of a step")
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="random adapters to make")
    parser.add_argument("--random-rank", type=int, default=16, metavar="R", help="their rank")
    args = parser.parse_args()
    tokenizer = open_tokenizer(args.model)
    for name in args.kinds:
        train(KINDS[name], args.model, tokenizer, args.folder / name, args.steps, args.batch, args.rate)
    if args.random:
        make_random(args.model, args.folder, args.random, args.random_rank)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
