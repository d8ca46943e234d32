"""Tables of times in docs/kernels from the results of `kda bench --json`, for doc_tables.py."""

import json
import pathlib

from doc_tables_python import table

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "bench" / "results"

SHAPES = {  # B, T, H, HV, K, V; docs/kernels/README.md
    "S1": (1, 8192, 96, 96, 128, 128),
    "S2": (16, 8192, 16, 16, 128, 256),
    "S3": (1, 4096, 16, 16, 128, 128),
    "S4": (2, 4096, 64, 64, 128, 128),
    "S5": (1, 131072, 32, 32, 128, 128),
}
NAMES = {shape: name for name, shape in SHAPES.items()}
GATES = ("softplus", "lower_bound")
# What this project set itself, ms: the least, and the goal.
FORWARD = {
    "S1": "0.80 / 0.40",
    "S2": "2.6 / 1.5",
    "S3": "0.12 / 0.06",
    "S4": "0.50 / 0.20",
    "S5": "4.0 / 2.2",
}
STEP = {
    "S1": "4.0 / 1.6",
    "S2": "14 / 5.6",
    "S3": "0.6 / 0.22",
    "S4": "2.6 / 0.9",
    "S5": "22 / 9",
}
STATE_SCAN = {"S1": "0.36 / 0.31", "S2": "1.50 / 1.38", "S3": "0.09 / 0.05"}


def rows_of(name: str) -> list:
    """The rows of a file, each with what the head above it says of it."""
    rows, head = [], {}
    for line in (RESULTS / name).read_text().splitlines():
        row = json.loads(line)
        if "median_ms" not in row:
            head = {key: row[key] for key in ("gate", "dtype", "command", "date") if key in row}
        else:
            rows.append({**head, **row})
    return rows


def lengths_of(row: dict) -> str:
    words = row["command"].split()
    return words[words.index("--lengths") + 1] if "--lengths" in words else ""


def key_of(row: dict) -> tuple:
    return tuple(row["shape"]), row["gate"], row.get("dtype", "bf16"), lengths_of(row)


def by_key(rows: list, operation: str) -> dict:
    """{(shape, gate, dtype, lengths): row}, the newest of each."""
    found = [row for row in rows if row["operation"] == operation]
    return {key_of(row): row for row in sorted(found, key=lambda row: row.get("date", ""))}


def ms(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.2f}"


def peers(operation: str, shape: tuple, impl: str) -> str:
    """Softplus / lower bound of a peer, those there are."""
    found = {
        row["gate"]: row["median_ms"]
        for row in rows_of("cuda_h200_peers.json")
        if (row["operation"], tuple(row["shape"]), row["impl"]) == (operation, shape, impl)
    }
    if not found:
        return ""
    if len(found) == 1:
        return f"{next(iter(found.values()))}"
    return " / ".join(f"{found[gate]}" if gate in found else "-" for gate in GATES)


def packed_text(lengths: str) -> str:
    parts = lengths.split(",")
    if len(set(parts)) == 1:
        return f"{len(parts)} of {parts[0]}"
    return "lengths " + ", ".join(parts)


def forwards() -> dict:
    """Forwards timed alone or in a step, whichever is newer."""
    rows = rows_of("cuda_h200_chunk_bwd.json") + rows_of("cuda_h200_chunk_fwd.json")
    return by_key(rows, "chunk_fwd")


def forward_section() -> str:
    found = forwards()

    def line(name: str, lengths: str, asked: str) -> list:
        shape = SHAPES[name]
        both = [found.get((shape, gate, "bf16", lengths)) for gate in GATES]
        floors = [row["floor_ms"] for row in both if row]
        cells = [f"{name} packed, {packed_text(lengths)}" if lengths else name]
        cells += [f"{floors[0]:.2f}" if floors else ""]
        cells += [ms(row["median_ms"]) if row else "" for row in both]
        cells += [asked]
        if lengths:
            return cells + ["", ""]
        return cells + [peers("chunk_fwd", shape, impl) for impl in ("FlashKDA", "fla")]

    lines = [line(name, "", asked) for name, asked in FORWARD.items()]
    packed = sorted({key[3] for key in found if key[3]}, key=len)
    lines += [line("S1", lengths, "1.15 S1") for lengths in packed]
    columns = ["", "floor", "softplus gate", "lower bound gate", "asked / goal"]
    columns += ["FlashKDA, lower bound", "fla: softplus / lower bound"]
    return table(columns, lines)


def other_forward_section() -> str:
    """Every other shape, in the order of tokens and heads."""
    others = {}
    for (shape, gate, dtype, lengths), row in forwards().items():
        if lengths or (shape in NAMES and dtype == "bf16"):
            continue
        others.setdefault((shape, dtype), {})[gate] = row
    lines = []
    for (shape, dtype), gates in sorted(others.items()):
        cells = [", ".join(map(str, (shape[0], shape[1], *shape[3:]))), dtype]
        cells += [ms(next(iter(gates.values()))["floor_ms"])]
        cells += [ms(gates[gate]["median_ms"]) if gate in gates else "" for gate in GATES]
        lines.append(cells)
    return table(["B, T, HV, K, V", "dtype", "floor", "softplus gate", "lower bound gate"], lines)


def steps_of(rows: list) -> dict:
    """{(shape, gate, dtype, lengths): (forward, backward)} where both are there."""
    forward, backward = by_key(rows, "chunk_fwd"), by_key(rows, "chunk_bwd")
    return {key: (forward[key], row) for key, row in backward.items() if key in forward}


def step_cell(step: tuple) -> str:
    first, second = (row["median_ms"] for row in step)
    return f"{ms(first)} + {ms(second)} = {ms(first + second)}"


def step_section() -> str:
    found = steps_of(rows_of("cuda_h200_chunk_bwd.json"))
    generic = steps_of(rows_of("cuda_h200_train.json"))
    lines = []
    for name, asked in STEP.items():
        shape = SHAPES[name]
        both = [found.get((shape, gate, "bf16", "")) for gate in GATES]
        floors = [sum(row["floor_ms"] for row in step) for step in both if step]
        cells = [name, f"{floors[0]:.2f}" if floors else ""]
        cells += [step_cell(step) if step else "" for step in both] + [asked]
        cells += [peers("step", shape, "fla")]
        slow = generic.get((shape, "softplus", "bf16", ""))
        cells += [f"{sum(row['median_ms'] for row in slow):.1f}" if slow else ""]
        lines.append(cells)
    columns = ["", "floor", "softplus gate: forward + backward", "lower bound gate"]
    columns += ["asked / goal", "fla: softplus / lower bound", "`cuda` rows, softplus"]
    return table(columns, lines)


def other_step_section() -> str:
    found = steps_of(rows_of("cuda_h200_chunk_bwd.json"))
    lines = []
    for (shape, gate, dtype, lengths), step in sorted(found.items()):
        if shape in NAMES and dtype == "bf16" and not lengths:
            continue
        cells = [", ".join(map(str, (shape[0], shape[1], *shape[3:]))), dtype]
        cells += [gate.replace("_", " ") + (f", {packed_text(lengths)}" if lengths else "")]
        cells += [ms(sum(row["floor_ms"] for row in step)), step_cell(step)]
        lines.append(cells)
    return table(["B, T, HV, K, V", "dtype", "gate", "floor", "forward + backward"], lines)


def state_scan_section() -> str:
    rows = [
        json.loads(line)
        for line in (RESULTS / "cuda_h200_state_scan.json").read_text().splitlines()
    ]
    found = {(row["shape"], row["dq_raw"]): row for row in rows if "median_ms" in row}
    lines = []
    for name, (B, T, _, HV, K, V) in SHAPES.items():
        if (name, False) not in found:
            continue
        cells = [name, f"{B}, {T}, {HV}, {K}, {V}"]
        plain, with_dq = found[name, False], found[name, True]
        cells += [ms(plain["floor_ms"]), ms(plain["median_ms"]), STATE_SCAN.get(name, "")]
        cells += [peers("state_scan", SHAPES[name], "fla")]
        lines.append(cells + [ms(with_dq["floor_ms"]), ms(with_dq["median_ms"])])
    columns = ["", "B, T, HV, K, V", "floor, ms", "measured, ms", "asked / goal", "fla"]
    return table([*columns, "dq_raw: floor", "dq_raw: measured"], lines)


def speed_section() -> str:
    """Softplus gate, bf16: what of the tables of the pages fits on the front page."""
    alone = forwards()
    steps = steps_of(rows_of("cuda_h200_chunk_bwd.json"))
    lines = []
    for B, T, H, HV, K, V in SHAPES.values():
        key = ((B, T, H, HV, K, V), "softplus", "bf16", "")
        if key not in alone or key not in steps:
            continue
        cells = [f"{B}, {T}, {HV}, {V}", ms(alone[key]["median_ms"])]
        cells += [peers("chunk_fwd", key[0], "fla").split(" / ")[0]]
        cells += [ms(sum(row["median_ms"] for row in steps[key]))]
        cells += [peers("step", key[0], "fla").split(" / ")[0]]
        lines.append(cells)
    columns = ["B, T, heads, V", "forward, ms", "fla", "forward + backward, ms", "fla"]
    return table(columns, lines)


def sections() -> dict:
    return {
        "README.md": {"speed": speed_section()},
        "docs/kernels/chunk_fwd.md": {
            "times": forward_section(),
            "other times": other_forward_section(),
        },
        "docs/kernels/chunk_bwd.md": {"times": step_section(), "other times": other_step_section()},
        "docs/kernels/state_scan.md": {"times": state_scan_section()},
    }
