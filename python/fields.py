# SPDX-License-Identifier: Apache-2.0
"""Writes the names in include/rafter/rafter.h as lines of macros: the argument structs and their
fields, the calls that take them, and the values of the enums. python/src/arguments.c includes the
result; offsets, sizes and types come from the compiler.

    python3 fields.py HEADER OUTPUT

Whatever in the header is not understood is an error, so that nothing is left out.
"""
import re
import sys

_STRUCT = re.compile(r"typedef struct (\w+) \{(.*?)\} \1;", re.S)
_FIELD = re.compile(r"(?:const )?(\w+)(?: \*| )(\w+)")
_FUNCTION_POINTER = re.compile(r"\w+(?: \*| )\(\*(\w+)\)\(.*\)", re.S)
_CALL = re.compile(r"RAFTER_API rafter_status rafter_(\w+)\(rafter_context \*context,\s*"
                   r"const (rafter_\w+_args) \*args\);")
_ENUM = re.compile(r"typedef enum (\w+) \{(.*?)\} \1;", re.S)
_OPTIONS = "rafter_loss_options"


def names(header):
    """The lines for the text of a header."""
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    structs = dict(_STRUCT.findall(text))
    calls = _CALL.findall(text)
    enums = _ENUM.findall(text)
    for what, found in (("struct", structs), ("enum", enums)):
        declared = len(re.findall(rf"\b{what}\b[^;{{]*\{{", text))
        if declared != len(found):
            raise ValueError(f"the header has {declared} {what}s with a body, but {len(found)} of them are "
                             f"`typedef {what} NAME {{ ... }} NAME;`")
    for name, args in calls:
        if args not in structs:
            raise ValueError(f"rafter_{name} takes a {args}, which the header does not declare")
    for struct in {args: None for _, args in calls} | {_OPTIONS: None}:
        for declaration in filter(None, map(str.strip, structs[struct].split(";"))):
            field, function = _FIELD.fullmatch(declaration), _FUNCTION_POINTER.fullmatch(declaration)
            if not field and not function:
                raise ValueError(f"{struct}: cannot read {declaration!r}, wanted one field `TYPE NAME`")
            # A pointer to another struct, or to a function, cannot be passed by name.
            opaque = function or field[1] in structs and field[1] != _OPTIONS
            yield f"{'OPAQUE' if opaque else 'FIELD'}({struct}, {function[1] if function else field[2]})"
    for name, args in calls:
        yield f"CALL({name}, {args})"
    for _, body in enums:
        for value in re.findall(r"(\w+)\s*=", body):
            yield f"VALUE({value})"


def main():
    header, output = sys.argv[1:]
    with open(header, encoding="utf-8") as file:
        lines = list(names(file.read()))
    with open(output, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
