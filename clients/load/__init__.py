"""Open-loop load on a running pool: what is sent when, sending it, and what came of it.

``schedule`` draws times, ``payloads`` makes frames, ``generator`` sends them and ``ledger`` notes each
frame's end; ``figures`` makes the result of it, ``report`` its tables and curves. The command is ``headrace
bench``.
"""
