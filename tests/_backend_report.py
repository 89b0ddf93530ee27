"""A pytest plugin that says, at the end, how many tests ran on each backend and CPU instruction set.

With --require-backend NAME the run fails if none ran on that backend: a build that silently lost its kernels must not pass.
Load it with ``-p tests._backend_report``.
"""

from collections import Counter

import pytest

OUTCOMES = ("passed", "failed", "skipped", "xfailed", "error")


def pytest_addoption(parser):
    parser.addoption(
        "--require-backend",
        action="append",
        default=[],
        metavar="NAME",
        help="fail unless a test ran on this backend (may be repeated)",
    )


def label(item):
    """The backend of a test, by its parameters: ``backend``, or ``isa`` for the CPU kernels."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if "backend" in parameters:
        return str(parameters["backend"])
    return f"cpu {parameters['isa']}" if "isa" in parameters else "(not tied to one)"


def pytest_runtest_setup(item):
    item.user_properties.append(
        ("backend", label(item))
    )  # user properties reach the reports, from workers too


def tally(stats):
    """{backend: {outcome: number}} from the terminal reporter's reports."""
    counts = {}
    for outcome in OUTCOMES:
        for report in stats.get(outcome, []):
            name = dict(report.user_properties).get("backend") if hasattr(report, "user_properties") else None
            if name:
                counts.setdefault(name, Counter())[outcome] += 1
    return counts


def missing(required, counts):
    ran = {name.split()[0] for name, count in counts.items() if count["passed"] + count["failed"]}
    return [name for name in required if name not in ran]


def pytest_terminal_summary(terminalreporter, config):
    counts = tally(terminalreporter.stats)
    terminalreporter.section("tests by backend")
    for name in sorted(counts):
        line = ", ".join(
            f"{counts[name][outcome]} {outcome}" for outcome in OUTCOMES if counts[name][outcome]
        )
        terminalreporter.write_line(f"{name:<20} {line}")
    for name in missing(config.getoption("require_backend"), counts):
        terminalreporter.write_line(f"ERROR: no test ran on backend {name}", red=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session, exitstatus):
    result = yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    required = session.config.getoption("require_backend")
    if exitstatus == pytest.ExitCode.OK and reporter and missing(required, tally(reporter.stats)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return result
