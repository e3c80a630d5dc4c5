"""Adapters (LoRA): read from PEFT's files, kept on disk, host and device, and added to the products of a step.

``layout`` says where an adapter's factors lie in a model's merged products, ``peft`` and ``adapter`` read one from its
files, ``store`` knows adapters by name and holds those on the host, ``bank`` is what the device has of them. Which slot
of the bank an adapter has is the scheduler's business (``scheduler.adapters``). Nothing is imported here: layers need
the bank, and the rest of the room needs the layers.
"""
