"""What workers print comes out of this process's sys.stdout."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stdout

from argosy.launch.shown import shown


def test_what_is_printed_to_the_descriptor_is_written_to_an_output_that_has_none():
    out = io.StringIO()
    with redirect_stdout(out), shown() as where:
        subprocess.run(["/bin/echo", "step 1\nbroken \udcff"], stdout=where.stdout, check=True)
    assert out.getvalue() == "step 1\nbroken \N{REPLACEMENT CHARACTER}\n"


def test_an_output_that_was_closed_keeps_nobody_waiting():
    out = io.StringIO()
    with redirect_stdout(out), shown() as where:
        out.close()
        os.write(where.stdout, b"words\n" * 100_000)  # more than a pipe holds


def test_the_standard_output_needs_no_detour():
    code = "from argosy.launch.shown import shown\nwith shown() as where: print(where.stdout, where.screen)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "None None\n"
