"""Fuzzers: random cases for the door, the kernels, the index and the parsers, held to what is promised.

Run as `python -m tests.fuzz`, or `make fuzz`. A module is a fuzzer if it has

    NAME: str                           its name on the command line
    draw(rng: random.Random) -> dict    a case: JSON that says everything needed to build it again
    check(case) -> None                 raises AssertionError with what was observed and what is allowed
    shrink(case) -> Iterator[dict]      simpler cases, the simplest first
    calls(case) -> int                  library calls that `check` makes

`check` may raise `tests.fuzz.cases.Refused` where the library refused the case, as it should.
"""
