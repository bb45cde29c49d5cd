"""The sources of settings, and their order of precedence.

    defaults  <  TOML file (--config, $POLYBUS_CONFIG)  <  POLYBUS_* variables  <  flags

A top-level key `data` is the variable `POLYBUS_DATA`; a key `max_payload` of
the section `[rqueue]` is `POLYBUS_RQUEUE_MAX_PAYLOAD`. An empty variable counts as
unset. Unknown keys in the file are errors because a mistyped limit would silently
not apply. An unknown `POLYBUS_*` variable is only a warning: Kubernetes sets
POLYBUS_SERVICE_HOST and POLYBUS_PORT in containers near a service called "polybus".

Every error is one line: the source of the value, section, key, the expected value, the
found value.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, get_type_hints

from polybus.bus.dialect_registry import installed_dialects
from polybus.errors import ConfigError, InvalidRule
from polybus.server.config_values import InvalidValue, check_bounds, from_text, from_toml
from polybus.server.settings import BOUNDS, CORE_SECTIONS, Settings

PREFIX = "POLYBUS_"
# Variables that are not settings: the client's default bus, the file itself, tracebacks.
NOT_SETTINGS = frozenset({"POLYBUS_URL", "POLYBUS_CONFIG", "POLYBUS_DEBUG"})
# A config is a page of text; something endless (a device, a log) is a mistake.
MAX_FILE_BYTES = 1024 * 1024
DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class SettingKey:
    """One setting: its place in the file and its type. Section "" is the top level."""

    section: str
    name: str
    kind: Any

    def __str__(self) -> str:
        return f"[{self.section}] {self.name}" if self.section else self.name

    @property
    def dotted(self) -> str:
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def variable(self) -> str:
        return PREFIX + self.dotted.replace(".", "_").upper()


@dataclass(frozen=True, slots=True)
class Flag:
    """A value given on the command line, with the name of its flag for error messages."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """The effective settings, the source of each, and warnings.

    `again` reads the same sources once more, for settings that a running bus reloads.
    """

    settings: Settings
    sources: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    again: Callable[[], LoadedSettings] | None = field(default=None, compare=False, repr=False)

    def rows(self) -> Iterator[tuple[SettingKey, Any, str]]:
        """Yield (key, value, source) of every setting, the top level first."""
        for key in setting_keys().values():
            place = self.settings.section(key.section) if key.section else self.settings
            yield key, getattr(place, key.name), self.sources.get(key.dotted, DEFAULT)


def load(
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Flag] | None = None,
) -> LoadedSettings:
    """Return the effective settings. `flags` is by dotted key; None means not given."""
    again = partial(load, file, environ, flags)
    environ = environ or {}
    if file is None and environ.get("POLYBUS_CONFIG"):
        file = Path(environ["POLYBUS_CONFIG"])
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    layers = [_of_file(file)] if file else []
    for layer in [*layers, _of_environment(environ), _of_flags(flags or {})]:
        for key, value, source in layer:
            values[key.dotted], sources[key.dotted] = value, source
    settings = _build(values)
    _check_together(settings, sources)
    return LoadedSettings(settings, sources, tuple(_unknown_variables(environ)), again)


@cache
def section_types() -> dict[str, type]:
    """Return the class of each section, the dialects' last."""
    hints = get_type_hints(Settings)
    dialects = {one.name: one.limits for one in installed_dialects() if one.limits is not None}
    return {**{name: hints[name] for name in CORE_SECTIONS}, **dialects}


@cache
def setting_keys() -> dict[str, SettingKey]:
    """Return every setting by its dotted name, the top level first."""
    keys = [
        SettingKey("", name, kind)
        for name, kind in get_type_hints(Settings).items()
        if name not in (*CORE_SECTIONS, "dialects")
    ]
    for section, its_type in section_types().items():
        keys += [SettingKey(section, name, kind) for name, kind in get_type_hints(its_type).items()]
    return {key.dotted: key for key in keys}


@cache
def setting_bounds() -> dict[str, tuple[float, float]]:
    """Return (lowest, highest) by dotted name, of the settings that have bounds of their own."""
    dialects = {
        f"{one.name}.{key}": bounds
        for one in installed_dialects()
        for key, bounds in one.bounds.items()
    }
    return {**BOUNDS, **dialects}


Layer = Iterator[tuple[SettingKey, Any, str]]


def _of_file(path: Path) -> Layer:
    for name, value in _read(path).items():
        if name in section_types():
            if not isinstance(value, dict):
                raise ConfigError(f"{path}: [{name}] is a section, not a value")
            entries = [(_known(path, name, inner), its) for inner, its in value.items()]
        else:
            entries = [(_known(path, "", name), value)]
        for key, given in entries:
            read = partial(from_toml, given, key.kind, path.parent)
            yield key, _checked(key, str(path), given, read), str(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: a config file has at most {MAX_FILE_BYTES} bytes")
        return tomllib.loads(raw.decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the config file: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not valid TOML: nested too deeply") from None


def _known(path: Path, section: str, name: str) -> SettingKey:
    dotted = f"{section}.{name}" if section else name
    keys = setting_keys()
    if dotted in keys:
        return keys[dotted]
    if section:
        siblings = [key.name for key in keys.values() if key.section == section]
        raise ConfigError(f"{path}: [{section}] has no key {name!r}{_hint(name, siblings)}")
    places = [*section_types(), *(key.name for key in keys.values() if not key.section)]
    raise ConfigError(f"{path}: no section or key is called {name!r}{_hint(name, places)}")


def _of_environment(environ: Mapping[str, str]) -> Layer:
    for key in setting_keys().values():
        text = environ.get(key.variable)
        if text:
            source = f"${key.variable}"
            yield key, _checked(key, source, text, partial(from_text, text, key.kind)), source


def _of_flags(flags: Mapping[str, Flag]) -> Layer:
    for dotted, flag in flags.items():
        key, value = setting_keys()[dotted], flag.value
        if value is None:
            continue
        read = partial(from_text, value, key.kind) if isinstance(value, str) else lambda v=value: v
        yield key, _checked(key, flag.name, value, read), flag.name


def _checked(key: SettingKey, source: str, given: Any, read: Callable[[], Any]) -> Any:
    """Return the value that `read` makes of `given`. Raises `ConfigError` with the source."""
    try:
        value = read()
        check_bounds(value, key.kind, setting_bounds().get(key.dotted))
    except InvalidValue as error:
        text = repr(given)
        shown = text if len(text) <= 80 else text[:77] + "..."
        raise ConfigError(f"{source}: {key}: expected {error}, found {shown}") from None
    except InvalidRule as error:
        raise ConfigError(f"{source}: {key}: {error}") from None
    return value


def _build(values: Mapping[str, Any]) -> Settings:
    parts: dict[str, Any] = {key: value for key, value in values.items() if "." not in key}
    sections: dict[str, Any] = {}
    for section, its_type in section_types().items():
        given = {
            key.name: values[key.dotted]
            for key in setting_keys().values()
            if key.section == section and key.dotted in values
        }
        sections[section] = its_type(**given)
    parts.update((name, sections.pop(name)) for name in CORE_SECTIONS)
    return Settings(**parts, dialects=sections)


def _check_together(settings: Settings, sources: Mapping[str, str]) -> None:
    """Raise `ConfigError` for settings that contradict each other."""
    limits = settings.limits
    if limits.outbox_high_water_bytes > limits.outbox_max_bytes:
        raise _contradiction(
            sources,
            "limits.outbox_high_water_bytes",
            "at most outbox_max_bytes",
            limits.outbox_high_water_bytes,
            limits.outbox_max_bytes,
        )
    for dialect in installed_dialects():
        if dialect.check_settings is not None:
            wrong = dialect.check_settings(settings.section(dialect.name), limits)
            if wrong is not None:
                key, rule, value, bound = wrong
                raise _contradiction(sources, f"{dialect.name}.{key}", rule, value, bound)
    if (settings.tls.certificate is None) != (settings.tls.key is None):
        given = "certificate" if settings.tls.certificate else "key"
        source = sources.get(f"tls.{given}", DEFAULT)
        raise ConfigError(f"{source}: [tls] has a {given} alone: certificate and key go together")


def _contradiction(
    sources: Mapping[str, str], dotted: str, rule: str, value: int, bound: int
) -> ConfigError:
    source = sources.get(dotted, DEFAULT)
    return ConfigError(
        f"{source}: {setting_keys()[dotted]}: expected {rule} ({bound}), found {value}"
    )


def _unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    known = {key.variable for key in setting_keys().values()} | NOT_SETTINGS
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            # All share the prefix, so only a very close name is worth suggesting.
            hint = _hint(name, sorted(known), likeness=0.85)
            yield f"${name} is not a setting of polybus and is ignored{hint}"


def _hint(word: str, known: list[str], likeness: float = 0.6) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=likeness)
    return f": did you mean {close[0]!r}?" if close else ""
