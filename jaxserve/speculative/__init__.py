"""Speculative decoding: several tokens of a row in one pass, where their guesses turn out right.

A proposer guesses what follows a row's newest token (``proposer``, and one file per method). The next step computes the
guesses beside that token, samples after each of them, and keeps those that sampling would have given (``verify``).
"""

from jaxserve.speculative.draft_model import DraftModelProposer
from jaxserve.speculative.drafts import NO_DRAFT, DraftState, Proposal, lineage
from jaxserve.speculative.eagle import EagleProposer
from jaxserve.speculative.eagle_head import EagleHead, eagle_specs, fuse, guess_logits, run_head
from jaxserve.speculative.medusa import MedusaProposer, head_logits, medusa_specs
from jaxserve.speculative.ngram import NgramProposer
from jaxserve.speculative.proposer import NoProposer, ProposeInput, Proposer
from jaxserve.speculative.suffix import SuffixProposer
from jaxserve.speculative.typical import TypicalAcceptance
from jaxserve.speculative.verify import Places, find_places, find_reached

__all__ = [
    "NO_DRAFT",
    "DraftModelProposer",
    "DraftState",
    "EagleHead",
    "EagleProposer",
    "MedusaProposer",
    "NgramProposer",
    "NoProposer",
    "Places",
    "Proposal",
    "ProposeInput",
    "Proposer",
    "SuffixProposer",
    "TypicalAcceptance",
    "eagle_specs",
    "find_places",
    "find_reached",
    "fuse",
    "guess_logits",
    "head_logits",
    "lineage",
    "medusa_specs",
    "run_head",
]
