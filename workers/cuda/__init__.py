"""The ``cuda`` engine: ONNX Runtime sessions on one GPU, captured as CUDA graphs and replayed.

``device`` is the seam to torch and ONNX Runtime, with ``torch_device`` and ``host_device`` behind it;
``graphs`` captures, ``slots`` orders the copies and replays of one batch, ``engine`` puts them together.
"""
