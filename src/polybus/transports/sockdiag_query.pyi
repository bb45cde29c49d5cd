def query_socket(
    descriptor: int,
    sequence: int,
    far_ip: bytes,
    far_port: int,
    near_ip: bytes,
    near_port: int,
) -> tuple[int, int, int] | None: ...
