"""What ``gpu_check`` and ``tune_kernels`` are made of: questions to one GPU, asked while the clock allows.

``timing`` measures; ``ragged``, ``products`` and ``model`` make batches over pools of blocks, weights and whole models
on the device; ``session`` holds what all sections need, ``sections`` runs them against a budget, ``table`` shows what
they found (``results``). The sections: ``bandwidth`` (what memory does at best), ``correctness``, ``decode_speed`` and
``prefill_speed`` (attention alone), ``product_speed``, ``step_speed`` (the runner's programs) and ``scan_speed`` (what
a scan over layers would cost). ``tuning_cases`` and ``tune`` are the tuner's.
"""

__all__: list[str] = []
