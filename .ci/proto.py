#!/usr/bin/env python3
"""Compiles gsb.proto into gsb_pb2.py and gsb_pb2.pyi, which are kept beside it.

`--check` writes nothing and fails if they do not agree with it. What protoc writes
demands a runtime of its own age; so only the description is taken from it, which
every protobuf understands.
"""

import re
import sys
import tempfile
import textwrap
from pathlib import Path

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

SOURCES = Path("src")
PROTO = Path("polybus/dialects/gsb/gsb.proto")

MODULE = '''\
"""gsb.proto, compiled by .ci/proto.py: do not edit.

The messages are in a pool of their own, so that a program may load another copy of
the same file.
"""

from google.protobuf import descriptor_pool, message_factory

DESCRIPTOR = descriptor_pool.DescriptorPool().AddSerializedFile(
{description}
)

for _name, _message in DESCRIPTOR.message_types_by_name.items():
    globals()[_name] = message_factory.GetMessageClass(_message)
for _enum in DESCRIPTOR.enum_types_by_name.values():
    globals().update({{_value.name: _value.number for _value in _enum.values}})
'''


def compiled():
    """The description of the file, and its stub."""
    with tempfile.TemporaryDirectory() as folder:
        set_file = Path(folder, "set")
        arguments = [f"-I{SOURCES}", f"--descriptor_set_out={set_file}", f"--pyi_out={folder}"]
        if protoc.main(["protoc", *arguments, str(PROTO)]):
            sys.exit("polybus: gsb.proto does not compile")
        found = descriptor_pb2.FileDescriptorSet.FromString(set_file.read_bytes())
        stub = Path(folder, PROTO).with_name("gsb_pb2.pyi").read_text()
        stub = re.sub(r"\b_Mapping\]", "_Mapping[str, object]]", stub)
    return found.file[0].SerializeToString(deterministic=True), stub


def written(description):
    pieces = [description[at : at + 48] for at in range(0, len(description), 48)]
    return MODULE.format(description=textwrap.indent("\n".join(map(repr, pieces)), " " * 4))


def described():
    """What the module that is there describes."""
    sys.path.insert(0, str(SOURCES))
    from polybus.dialects.gsb import gsb_pb2

    return gsb_pb2.DESCRIPTOR.serialized_pb


def main():
    description, stub = compiled()
    module = (SOURCES / PROTO).with_name("gsb_pb2.py")
    if "--check" in sys.argv:
        if described() != description:
            sys.exit(f"polybus: {module} is not what gsb.proto says: run .ci/proto.py")
        return
    module.write_text(written(description))
    module.with_suffix(".pyi").write_text(stub)


if __name__ == "__main__":
    main()
