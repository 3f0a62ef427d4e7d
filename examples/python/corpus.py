"""Text files as tokens: bytes, and one that ends a text."""

import functools

import torch
from llama import Shape


class Text:
    """Texts as bytes, one after another, and batches of them."""

    def __init__(self, args, parser):
        for root in args.text:
            if not root.exists():
                parser.error(f"--text: there is no {root}")
        self.training, self.held = halves(tuple(args.text), args.suffix)
        self.length, self.batch, self.seed = args.context + 1, args.batch, args.seed
        self.batches = args.evaluate_batches
        for tokens, what in [(self.training, "training"), (self.held, "evaluation")]:
            if len(tokens) <= self.length:
                parser.error(f"--text: {len(tokens)} bytes for {what}, fewer than --context + 2")

    def windows(self, tokens, starts, share, device):
        """This worker's part of a batch."""
        part, parts = share
        mine = starts[part * len(starts) // parts : (part + 1) * len(starts) // parts]
        return torch.stack([tokens[i : i + self.length] for i in mine]).long().to(device)

    def step(self, number, share, device):
        draw = torch.Generator().manual_seed((self.seed << 32) + number)
        starts = torch.randint(len(self.training) - self.length, (self.batch,), generator=draw)
        return self.windows(self.training, starts, share, device)

    def evaluation(self, share, device):
        starts = torch.linspace(0, len(self.held) - self.length, self.batches * self.batch).long()
        for part in starts.view(self.batches, self.batch):
            yield self.windows(self.held, part, share, device)


def files(root, suffix):
    found = [root] if root.is_file() else sorted(root.rglob(f"*{suffix}"))
    return [path for path in found if path.is_file()]


@functools.cache
def halves(roots, suffix):
    """What models are trained on, and what is held out: each is read once by a process."""
    texts = [path.read_bytes() for root in roots for path in files(root, suffix)]
    held = [text for i, text in enumerate(texts) if i % 64 == 63]
    kept = [text for i, text in enumerate(texts) if i % 64 != 63]
    if not held:  # the end of each
        held = [text[len(text) * 63 // 64 :] for text in texts]
        kept = [text[: len(text) * 63 // 64] for text in texts]
    return joined(kept), joined(held)


def joined(texts):
    """The tokens of texts, one after another."""
    end = torch.tensor([Shape.end], dtype=torch.short)
    numbers = [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts if text]
    return torch.cat([part for each in numbers for part in (each.short(), end)] or [end])
