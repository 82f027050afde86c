"""Simulates devices under the dispatch core and under other policies: `python -m wooly_testkit.simulate --help`.

Time is virtual. Unlike the core, the simulator reads files, uses random numbers and prints. The arrivals and the noise of each
tenant have separate random streams, named by seed, device and tenant. So all policies see the same arrivals and durations.
"""
