#!/usr/bin/env python3
"""Where the register spills of CUDA kernels lie: for each kernel that has any, its loops with the spill instructions of
each (not of the loops inside it). Needs cuobjdump of the CUDA toolkit.

    nvcc -std=c++20 -O3 -Isrc -Iinclude -gencode=arch=compute_90a,code=sm_90a -cubin src/cuda/generic/wu.cu -o wu.cubin
    tools/spilled_loops.py wu.cubin

Exits 1 if a loop without loops inside it, where the arithmetic is, spills.
"""
import re
import subprocess
import sys

INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?);")
BRANCH = re.compile(r"(@!?U?P\w+ )?BRA(?:\.\w+)* (.*)")
END = re.compile(r"(@!?U?P\w+ )?(?:EXIT|RET|BRX)")


def kernels_of(path):
    """(name, [(address, instruction)]) of each kernel."""
    text = subprocess.run(["cuobjdump", "-sass", path], capture_output=True, text=True, check=True).stdout
    for part in text.split("Function : ")[1:]:
        name, _, body = part.partition("\n")
        yield name.strip(), [(int(m[1], 16), m[2]) for m in map(INSTRUCTION.match, body.splitlines()) if m]


def blocks_of(code):
    """Basic blocks as (first, end) indices, and the successors of each."""
    index = {address: i for i, (address, _) in enumerate(code)}
    jumps, leaders = {}, {0}
    for i, (_, text) in enumerate(code):
        if m := BRANCH.match(text):
            target = index[int(re.findall(r"0x[0-9a-f]+", m[2])[-1], 16)]
            jumps[i] = target, bool(m[1] or re.search(r"\bU?P\d", m[2]))
            leaders |= {target, i + 1}
        elif m := END.match(text):
            jumps[i] = None, bool(m[1])
            leaders.add(i + 1)
    starts = sorted(i for i in leaders if i < len(code))
    number = {first: n for n, first in enumerate(starts)}
    blocks = list(zip(starts, starts[1:] + [len(code)]))
    successors = []
    for _, end in blocks:
        target, falls_through = jumps.get(end - 1, (None, True))
        following = [] if target is None else [number[target]]
        successors.append(following + ([number[end]] if falls_through and end < len(code) else []))
    return blocks, successors


def dominators(successors):
    """The reachable blocks in an order of a depth-first search, and the blocks that each of them cannot do without."""
    order, seen, stack = [], {0}, [(0, iter(successors[0]))]
    while stack:
        block, rest = stack[-1]
        following = next((b for b in rest if b not in seen), None)
        if following is None:
            order.append(stack.pop()[0])
        else:
            seen.add(following)
            stack.append((following, iter(successors[following])))
    order.reverse()
    before = {b: [a for a in order if b in successors[a]] for b in order}
    dominating, changed = {0: {0}}, True
    while changed:
        changed = False
        for block in order[1:]:
            found = set.intersection(*(dominating[b] for b in before[block] if b in dominating)) | {block}
            if dominating.get(block) != found:
                dominating[block], changed = found, True
    return before, dominating


def loops_of(successors):
    """Natural loops: the set of blocks of each, by its head."""
    before, dominating = dominators(successors)
    loops = {}
    for block in before:
        for head in successors[block]:
            if head not in dominating[block]:
                continue
            body, stack = loops.setdefault(head, {head}), [block]
            while stack:
                inside = stack.pop()
                if inside not in body:
                    body.add(inside)
                    stack += before[inside]
    return loops.values()


def main():
    bad = False
    for path in sys.argv[1:]:
        for name, code in kernels_of(path):
            blocks, successors = blocks_of(code)

            def count(pattern, chosen):
                return sum(bool(re.search(pattern, code[i][1])) for b in chosen for i in range(*blocks[b]))

            if not count(r"\b(STL|LDL)", range(len(blocks))):
                continue
            print(name)
            loops = sorted(loops_of(successors), key=len, reverse=True)
            for body in loops:
                inner = [other for other in loops if other < body]
                own = body.difference(*inner)
                stores, loads = count(r"\bSTL", own), count(r"\bLDL", own)
                depth = sum(body <= other for other in loops)
                print(f"{'  ' * depth}loop of {sum(blocks[b][1] - blocks[b][0] for b in body)} instructions: "
                      f"{stores} stores, {loads} loads, {count('FFMA|DFMA|MUFU', own)} FMA or MUFU of its own")
                bad |= not inner and stores + loads > 0
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
