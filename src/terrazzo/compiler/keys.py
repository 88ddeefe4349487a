"""What compiled code depends on, as keys of the cache, and what lies under them.

What makes code is not imported here: to find it takes none of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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


def load_compiled(key: str, options: Options) -> Executable | None:
    """What was compiled under a key, if it has one and the cache still has that."""
    cache = default_cache(options.settings)
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
