"""What disks and people do to files: one damage at a time, drawn by a seed."""

import random
from pathlib import Path


def damage(draw: random.Random, files: list[Path]) -> str:
    """Changes one or two of the files -> what was done."""
    file, other = draw.sample(files, 2)
    data = bytearray(file.read_bytes())
    place = draw.randrange(max(len(data), 1))
    match draw.choice(["flip", "flip", "zero", "cut", "grow", "delete", "swap", "copy"]):
        case "flip" if data:
            data[place] ^= 1 << draw.randrange(8)
            what = f"bit of byte {place} flipped in {file.name}"
        case "zero":
            end = min(place + draw.choice([1, 512, 4096]), len(data))
            data[place:end] = bytes(end - place)
            what = f"bytes {place} to {end} zeroed in {file.name}"
        case "cut":
            del data[place:]
            what = f"{file.name} cut to {place} bytes"
        case "grow":
            data += draw.randbytes(64)
            what = f"64 bytes behind {file.name}"
        case "swap":
            mine, theirs = file.read_bytes(), other.read_bytes()
            file.write_bytes(theirs)
            other.write_bytes(mine)
            return f"{file.name} and {other.name} swapped"
        case "copy":
            file.write_bytes(other.read_bytes())
            return f"{other.name} copied over {file.name}"
        case _:
            file.unlink()
            return f"{file.name} deleted"
    file.write_bytes(data)
    return what
