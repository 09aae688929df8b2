"""headrace.clients: see docs/architecture.md."""

# The folder stands at the top of the repository but is imported under the headrace root only: a bare
# `import clients` would make a second copy of every class in it.
if __name__ != "headrace.clients":
    raise ImportError(f"import this package as headrace.clients, not as {__name__}")
