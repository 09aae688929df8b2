"""A deterministic world in which the production core and the production sessions meet faults.

Nothing here knows how the core works: processes are nodes that turn as the shells do, messages cross links
that behave as TCP does, and referees judge what they see at the edges. See ``world`` for the theory of
operation and docs/simulation.md for how to use it.
"""
