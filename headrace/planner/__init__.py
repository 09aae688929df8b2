"""The planner: the production core in simulated time, and what is worked out from recorded traffic.

``world`` drives a BrokerCore with workers and streams that exist as numbers only; ``study`` compares
alternatives with it; ``size_plan`` finds size classes. Not here: the simulator of faults (tests/simulation),
which breaks things on purpose; nothing breaks in this world. Everything is seeded: equal arguments give equal
answers.
"""
