#!/usr/bin/env python3
"""Compiles each .proto file into a module and its stub, which are kept beside it.

`--check` writes nothing and fails if a module does not agree with its .proto file. A module
that protoc generates needs a runtime of the same version. The description that protoc makes of
a file works with every runtime, so the modules contain only that.
"""

import importlib
import re
import sys
import tempfile
import textwrap
from pathlib import Path

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

SOURCES = Path("src")
PROTOS = (Path("polybus/dialects/gsb/gsb.proto"), Path("polybus/dialects/gsb/ya/ya.proto"))

MODULE = '''\
"""{proto}, compiled by .ci/proto.py: do not edit.

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


def compiled(proto):
    """The description of the file, and its stub."""
    with tempfile.TemporaryDirectory() as folder:
        set_file = Path(folder, "set")
        arguments = [f"-I{SOURCES}", f"--descriptor_set_out={set_file}", f"--pyi_out={folder}"]
        if protoc.main(["protoc", *arguments, str(proto)]):
            sys.exit(f"polybus: {proto.name} does not compile")
        found = descriptor_pb2.FileDescriptorSet.FromString(set_file.read_bytes())
        stub = Path(folder, proto).with_name(f"{proto.stem}_pb2.pyi").read_text()
        stub = re.sub(r"\b_Mapping\]", "_Mapping[str, object]]", stub)
    return found.file[0].SerializeToString(deterministic=True), stub


def written(proto, description):
    pieces = [description[at : at + 48] for at in range(0, len(description), 48)]
    text = textwrap.indent("\n".join(map(repr, pieces)), " " * 4)
    return MODULE.format(proto=proto.name, description=text)


def described(proto):
    """Return the description in the present module."""
    name = ".".join([*proto.parent.parts, f"{proto.stem}_pb2"])
    return importlib.import_module(name).DESCRIPTOR.serialized_pb


def main():
    sys.path.insert(0, str(SOURCES))
    for proto in PROTOS:
        description, stub = compiled(proto)
        module = (SOURCES / proto).with_name(f"{proto.stem}_pb2.py")
        if "--check" not in sys.argv:
            module.write_text(written(proto, description))
            module.with_suffix(".pyi").write_text(stub)
        elif described(proto) != description:
            sys.exit(f"polybus: {module} does not agree with {proto.name}; run .ci/proto.py")


if __name__ == "__main__":
    main()
