"""What compiled code depends on, as keys of the cache, and what lies under them.

What makes code is not imported here: to find it takes none of that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from terrazzo.chips.chip import Chip
from terrazzo.chips.registry import chip_for
from terrazzo.errors import ArtifactError
from terrazzo.knobs import Settings
from terrazzo.runtime import artifact as artifacts
from terrazzo.runtime.cache import default_cache, make_key, source_stamp
from terrazzo.runtime.executable import Executable

if TYPE_CHECKING:
    from terrazzo.compiler.lowering import Lowering
    from terrazzo.compiler.options import Options


def graph_key(lowering: Lowering, notes: Mapping[str, Any] | None = None) -> str:
    """What a compiled graph depends on, as a cache key; empty where that cannot be told.

    What users' rules do is told best by the graph that they made.
    """
    from terrazzo.runtime.content import Unknowable, graph_text

    rewritten = bool(lowering.options.rules)
    if not lowering.chip.keeps_code:
        return ""
    try:
        text = graph_text(lowering.graph if rewritten else lowering.source)
    except Unknowable:
        return ""
    return make_key(source_stamp(), str(lowering.options.settings.code_key),
                    "rewritten" if rewritten else "", text, str(lowering.strides),
                    str(lowering.over) if lowering.over else "",
                    str(sorted((notes or {}).items())), chip=lowering.chip.spec)


def model_key(options: Options, *parts: str) -> str:
    """A cache key for a model by its digest and what it is compiled with.

    Empty where there are rules of the user's: a digest does not tell what they make of a model.
    """
    return "" if options.rules else settings_key(options.settings, *parts)


def settings_key(settings: Settings, *parts: str) -> str:
    """The same where there are no rules; empty where a chip's code is not kept."""
    chip = chip_for(settings)
    if not chip.keeps_code:
        return ""
    return make_key(source_stamp(), str(settings.code_key), "model", *parts, chip=chip.spec)


# Where a chip measures choices, code is kept under its key and those that were measured for the
# programs in it. Which programs these are is kept under the key alone: to know takes compiling.
def chosen_key(key: str, settings: Settings, chip: Chip) -> str:
    """The key of code with the choices that there are now; empty where it has to be compiled."""
    if not key or not chip.tunes:
        return key
    from terrazzo.runtime.tuned import database, noted

    listed = default_cache(settings).get(_list_key(key))
    if listed is None:
        return ""
    known = database(settings)
    found = {program: known.find(chip.tunes, program) for program in json.loads(listed)}
    if found and not chip.absence and (noted() is not None or (
            settings.tune and None in found.values())):
        return ""
    return _with_choices(key, {p: m and dict(m.choice) for p, m in found.items()})


def kept_key(key: str, settings: Settings, chip: Chip, choices: Mapping[str, Any]) -> str:
    """The same for code that was just compiled, with what was chosen then."""
    if not key or not chip.tunes:
        return key
    default_cache(settings).put(_list_key(key), json.dumps(sorted(choices)).encode())
    return _with_choices(key, choices)


def _list_key(key: str) -> str:
    return hashlib.sha256(f"programs of {key}".encode()).hexdigest()


def _with_choices(key: str, choices: Mapping[str, Any]) -> str:
    measured = {program: c for program, c in choices.items() if c is not None}
    if not measured:
        return key
    return hashlib.sha256(f"{key} {json.dumps(measured, sort_keys=True)}".encode()).hexdigest()


def load_compiled(key: str, options: Options, chip: Chip | None = None) -> Executable | None:
    """What was compiled under a key, if it has one and the cache still has that."""
    cache = default_cache(options.settings)
    key = chosen_key(key, options.settings, chip or options.chip)
    stored = cache.find(key) if key else None
    if stored is None:
        return None
    try:
        return Executable(artifacts.load(stored, remember=True))
    except ArtifactError as error:
        cache.discard(key, str(error))
    except OSError as error:  # no damage: it is gone, or this process has too many files open
        cache.note_unreadable(error)
    return None
