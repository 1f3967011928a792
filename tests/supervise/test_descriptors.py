"""A coordinator may have as many connections as the machine allows; a machine that does not allow enough is named."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from argosy.errors import UserError
from argosy.supervise.descriptors import check_descriptors

CODE = """
import resource
from argosy.supervise.descriptors import raise_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 256))
raise_limit()
files = [open("/dev/null") for _ in range(100)]
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_limit_is_raised_as_far_as_it_goes():
    said = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout
    assert said == "(256, 256)\n"


def test_a_machine_that_allows_too_few_is_named_with_the_number_that_is_needed(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 2111))
    with pytest.raises(UserError, match=r"launch\.nodes = 2048: .* needs 2112 file descriptors, .* have 2111 \(ulimit"):
        check_descriptors(2048)
    check_descriptors(2047)
