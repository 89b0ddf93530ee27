"""The solver of plans against brute force."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from pyckpt.checkpointing._solver import Chain, Option

number = st.integers(0, 20)


def option(length):
    return st.builds(Option, st.just("option"), st.just(length), *[number] * 5)


@st.composite
def chains(draw):
    count = draw(st.integers(1, 4))
    options = []
    for place in range(count):
        here = [draw(option(1)) for _ in range(draw(st.integers(1, 3)))]
        for length in range(2, count - place + 1):
            if draw(st.booleans()):
                here.append(draw(option(length)))
        options.append(here)
    return Chain(options, [draw(number) for _ in range(count)], draw(number), draw(number), draw(number))


def every_choice(chain, place=0):
    if place == len(chain.options):
        yield []
        return
    for option in chain.options[place]:
        if place + option.length <= len(chain.options):
            for rest in every_choice(chain, place + option.length):
                yield [option, *rest]


def seconds(chosen):
    return sum(option.time for option in chosen)


@settings(max_examples=300, deadline=None)
@given(chains(), st.integers(0, 120))
def test_solver_against_brute_force(chain, budget):
    fitting = [chosen for chosen in every_choice(chain) if chain.peak(chosen) <= budget]
    chosen = chain.solve(budget)
    assert (chosen is None) is (not fitting)
    if chosen is not None:
        assert chain.peak(chosen) <= budget
        assert seconds(chosen) == min(map(seconds, fitting))
    smallest = min(map(chain.peak, every_choice(chain)))
    assert chain.smallest() == smallest
    assert chain.solve(smallest) is not None and chain.solve(smallest - 1) is None


def test_no_budget_is_met_without_choices():
    segment = Option("segment", 2, 1, 1, 1)
    assert Chain([[segment], []], [0, 0], 0).smallest() == 1
    for options in ([[], []], [[segment], [], []]):
        chain = Chain(options, [0] * len(options), 0)
        assert chain.solve(10**9) is None and chain.smallest() is None


@settings(max_examples=200, deadline=None)
@given(chains(), st.lists(st.integers(0, 120), min_size=2, max_size=5))
def test_a_larger_budget_is_never_slower(chain, budgets):
    times = [seconds(c) for c in map(chain.solve, sorted(budgets)) if c is not None]
    assert times == sorted(times, reverse=True)


def test_solver_is_fast_on_deep_models():
    """96 blocks, six choices, all segments."""
    costs = [(32, 40, 100), (20, 36, 97), (12, 36, 106), (6, 34, 113), (2, 40, 120), (1, 50, 140)]
    single = [Option(str(i), 1, *cost) for i, cost in enumerate(costs)]
    options = [
        single + [Option("segment", n, 2, 20 * n + 20, 100 + 125 * (n - 1)) for n in range(2, 97 - place)]
        for place in range(96)
    ]
    chain = Chain(options, [0] * 96, 0)
    start = time.process_time()
    assert chain.peak(chain.solve(300)) <= 300
    assert time.process_time() - start < 20
