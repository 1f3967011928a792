"""The lease in the run's folder: for machines that share a disk, and for one machine. It needs no service.

Each holder takes the next number in a folder of claims (`checkpoint.claims`), and renews by changing a file of that
number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from argosy.checkpoint.claims import Claims, Taken
from argosy.supervise.lease.lease import Holder, LeaseLost, LeaseUnreachable, Watched

FOLDER = ".coordinators"


class FolderLease:
    """A `Lease` in the run's folder; its token is a claim's number."""

    def __init__(self, run_dir: Path, token: str = ""):
        self._folder = run_dir / FOLDER
        self._claims = Claims(self._folder)
        self.token, self._renewals = token, 0
        self._watched = Watched()

    def holder(self) -> Holder | None:
        """Return the coordinator that holds the lease; None if it is free, or was not renewed in `TTL_S` of looking."""
        _, text = self._newest()
        return Holder.parse(text) if text else None

    def acquire(self, me: Holder) -> bool:
        """Take the lease if it is free, or held by an earlier coordinator of `me.owner`, which is dead."""
        number, text = self._newest()
        if text and Holder.parse(text).owner != me.owner:
            return False
        try:
            with _reachable():
                self._claims.take(number + 1, str(me))
                self._renewal(number).unlink(missing_ok=True)
        except Taken:
            return False
        self.token = str(number + 1)
        return True

    def renew(self) -> None:
        """Keep the lease for another `TTL_S`. Raises: LeaseLost."""
        self.check(0)
        self._renewals += 1
        with _reachable():
            self._renewal(int(self.token)).write_text(str(self._renewals))

    def check(self, generation: int) -> None:
        """Raises: LeaseLost if another has taken the lease. Which generation begins is noted by the fence alone."""
        with _reachable():
            if not self._claims.owner(int(self.token)):
                raise LeaseLost(f"another coordinator has taken the lease in {self._folder}")

    def release(self) -> None:
        """Give the lease up, if this process still holds it: it is free at once."""
        with _reachable():
            self._claims.give_up(int(self.token))

    def _newest(self) -> tuple[int, str]:
        """Return the newest number, and what its holder has written; "" if it gave the lease up or let it end."""
        with _reachable():
            number = self._claims.newest()
            text = self._claims.owner(number) if number else ""
            path = self._renewal(number)
            has_ended = self._watched.has_ended((text, path.read_text() if path.exists() else ""))
        return number, "" if has_ended else text

    def _renewal(self, number: int) -> Path:
        return self._folder / f"renewed-{number:08d}"


@contextmanager
def _reachable() -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise LeaseUnreachable(str(problem)) from None
