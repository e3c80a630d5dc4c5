#!/usr/bin/env python3
"""Tokens of adapters on a real model beside those of transformers with the adapter merged into the weights.

    python tools/train_adapters.py adapters --random 30
    python tools/check_adapters.py adapters

Every adapter of the folder writes greedily, alone and in one batch with all others and the base model, over fewer slots
than there are adapters. A token is right if it is the likeliest one after what stands before it; what lies less than
1e-4 below is a tie. Exits with 1 if a token is wrong.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from train_adapters import load_base

from jaxserve import LLM, LoRARequest, SamplingParams
from jaxserve.outputs import RequestOutput

__all__ = ["main"]

QUESTIONS = ("Who are you?", "How many customers are there?", "What is the sea?")
TIE = 1e-4

Asked = Sequence[LoRARequest | None]


def _chats(questions: Sequence[str]) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": question}] for question in questions]


def _generate(model: str, asked: Asked, num_tokens: int, num_slots: int) -> tuple[list[RequestOutput], ...]:
    """Outputs alone, and mixed. What trained adapters and the base model answer is printed."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens)
    sizes = {"max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 16, "max_loras": num_slots}
    settings: dict[str, Any] = {"dtype": "float32", "quantization": "none", "enable_lora": True, "warmup": False}
    chats = _chats([QUESTIONS[i % len(QUESTIONS)] for i in range(len(asked))])
    with LLM(model, **sizes, **settings) as llm:
        ask = lambda chats, own: llm.chat(chats, params, lora_request=own, use_tqdm=False)  # noqa: E731
        alone = [ask(chat, own)[0] for chat, own in zip(chats, asked, strict=True)]
        mixed = ask(chats, asked)
        for own in asked:
            name = own.lora_name if own else "base"
            if not name.startswith("random"):
                for question, output in zip(QUESTIONS, ask(_chats(QUESTIONS), own), strict=True):
                    print(f"{name:>12}  {question:32} {output.outputs[0].text!r}")
    return alone, mixed


def _gaps(model: Any, output: RequestOutput) -> torch.Tensor:
    """How far below the likeliest token each token of the output is."""
    prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    gaps: torch.Tensor = logits.max(-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return gaps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the adapters lie")
    parser.add_argument("--model", default="smollm2-135m", help="their base model")
    parser.add_argument("--tokens", type=int, default=24, help="most tokens of an output")
    parser.add_argument("--slots", type=int, default=8, help="slots on the device")
    args = parser.parse_args()
    adapters = sorted(path.parent for path in args.folder.glob("*/adapter_config.json"))
    if not adapters:
        parser.error(f"{args.folder} has no folders with an adapter_config.json.")
    asked = [None, *(LoRARequest(path.name, i, str(path)) for i, path in enumerate(adapters, start=1))]
    base = load_base(args.model).eval()
    num_tokens = num_ties = num_wrong = 0
    for own, *outputs in zip(asked, *_generate(args.model, asked, args.tokens, args.slots), strict=True):
        model = base
        if own is not None:
            model = PeftModel.from_pretrained(copy.deepcopy(base), own.lora_path).merge_and_unload().eval()
        for output in outputs:
            gaps = _gaps(model, output)
            wrong = int((gaps >= TIE).sum())
            num_tokens, num_wrong = num_tokens + len(gaps), num_wrong + wrong
            num_ties += int((gaps > 0).sum()) - wrong
            if wrong:
                print(f"{own.lora_name if own else 'base'}: a token is {float(gaps.max()):.2e} below the likeliest")
    print(f"{len(adapters)} adapters, alone and mixed: {num_tokens} tokens, {num_ties} ties, {num_wrong} wrong")
    return int(num_wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
