"""A plugin of pytest: which tests were skipped, but for those that this machine cannot run.

    SKIPPED=FILE PYTHONPATH=.ci python -m pytest -p skipped

FILE has a line for each test, or for a module that was skipped whole. .ci/run gives these lines to
pytest once all packages are installed, and then demands an empty file.
"""

import os
from pathlib import Path

import pytest

MACHINE = ("needs a GPU", "TEST_MODEL", "x86")  # in the reasons that may stay


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = []
    for report in reporter.stats.get("skipped", []):
        reason = report.longrepr[2]
        if not any(word in reason for word in MACHINE):
            skipped.append(report.nodeid)
    Path(os.environ["SKIPPED"]).write_text("".join(f"{test}\n" for test in skipped))
