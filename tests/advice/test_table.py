"""Every message that advises has an entry, and every entry a message."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter

from tests.advice import entries
from tests.advice.not_advice import NOT_ADVICE
from tests.advice.sites import advice_sites
from tests.advice.world import ENTRIES

for module in pkgutil.iter_modules(entries.__path__):
    importlib.import_module(f"{entries.__name__}.{module.name}")

KEYS = Counter(entry.key for entry in ENTRIES)


def test_every_message_that_advises_has_an_entry() -> None:
    missing = advice_sites().keys() - KEYS.keys() - NOT_ADVICE.keys()
    assert not missing, "write entries (tests/advice/world.py says how) of " + ", ".join(sorted(missing))


def test_every_entry_has_a_message() -> None:
    gone = (KEYS.keys() | NOT_ADVICE.keys()) - advice_sites().keys()
    assert not gone, f"the source has no message of {sorted(gone)}"


def test_every_key_is_in_one_list() -> None:
    assert not KEYS.keys() & NOT_ADVICE.keys()
