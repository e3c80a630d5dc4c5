"""Training of what guesses tokens ahead, on what the served model itself writes (self-distillation).

``prompts`` are continued by the model (``distill``), which leaves hidden states and the tokens that followed them on
disk; ``medusa`` trains heads on these; ``run`` puts the parts in order, so that a training that was stopped goes on.
"""
