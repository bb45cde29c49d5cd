from typing import Any

def columns_of(
    requests: list[Any],
    kind: type[tuple[object, ...]],
    max_key_bytes: int,
    max_body_bytes: int,
) -> tuple[bytes | None, bytes, bytes, bytes, bytes] | None: ...
