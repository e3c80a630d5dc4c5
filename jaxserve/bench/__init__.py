"""Measuring: a server under load, this engine offline, its start-up, and the claims behind its design.

Every figure comes from a run, none is assumed. The modules are imported one by one, by the command that needs them:
some need an engine, some only a client.
"""
