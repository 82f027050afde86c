"""Devices in virtual time under the dispatch core and under other policies: `python -m wooly_testkit.simulate --help`.

Outside the core: it reads files, draws from seeded streams and prints. Every tenant's arrivals and every tenant's noise have
streams of their own, named by seed, device and tenant, so that policies are compared on the same arrivals and durations.
"""
