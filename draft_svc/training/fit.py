"""``pilotfish train fit``: trains a head on captured text, one process or several (torchrun).

The loop is the usual one. What a step does follows from the seed and the step's number alone, so that a run that was
stopped goes on as if it had not been; and all processes take parts of one batch, so that two do together what one does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from draft_svc.training import checkpoint
from draft_svc.training.checkpoint import Position
from draft_svc.training.config import FitConfig
from draft_svc.training.data import Batch, Corpus, Document, epoch_batches
from draft_svc.training.drafting import ChainQuality, measure_chains
from draft_svc.training.export import begin_from, export
from draft_svc.training.heads import DraftModel, Eagle3Head, Head, MedusaHeads, MTPHead, layer_sizes
from draft_svc.training.shards import Manifest, Shard, shard_paths
from draft_svc.training.target import Target
from draft_svc.training.teacher import Teacher
from draft_svc.training.trainee import Losses, Trainee
from draft_svc.training.vocabulary import choose_vocabulary
from pilotfish.errors import InvalidArgumentError
from pilotfish.runtime.config import ModelConfig
from pilotfish.tokenizer_hash import load_tokenizer

LOG = "log.jsonl"
HEAD = "head"
_SAVE_SECONDS = 30.0  # that an interrupted run loses at most; a measurement takes longer than a checkpoint


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step did, for whoever watches."""

    position: Position
    visits: int
    """That there are to be in all."""
    lr: float
    losses: Losses
    """Means over the step's rows."""
    quality: ChainQuality | None
    """Of the documents held out, if they were drafted on."""


class Fit:
    """One run.

    Args:
        config: what to train.
        device: where; None for the CPU, or this process's GPU.
    """

    def __init__(self, config: FitConfig, device: torch.device | None = None) -> None:
        self._config = config
        self._device = device or torch.device("cpu")
        self._rank, self._processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        manifest = Manifest.read(config.data)
        target = Target.load(config.target_model, manifest, torch.float32)
        self._sizes = target.config
        self._vocabulary = _vocabulary(config, manifest, target.config.vocab_size)
        products = getattr(torch, config.dtype)
        output = target.output(self._vocabulary).to(products)
        torch.manual_seed(config.seed)  # of what initialise draws
        head = create_head(config, target.config)
        head.initialise(target.weights)
        teacher = Teacher(output.bfloat16(), manifest, config.data)
        self._corpus = Corpus(config.data, head.features, teacher)
        self._trainee = Trainee(
            head, target.embeddings.to(products), output, config.objective, train_output=config.train_output
        )
        if config.init is not None:
            begin_from(config.init, self._trainee, self._vocabulary)
        self._trainee.to(self._device)
        self._vocabulary = self._vocabulary.to(self._device)
        self._optimizers = create_optimizers(self._trainee, config)
        self._module: nn.Module = self._trainee
        if self._processes > 1:
            self._module = DistributedDataParallel(self._trainee)

    def run(self, report: Callable[[Progress], None] = lambda progress: None) -> Path:
        """Trains to the end, from a checkpoint if there is one; returns the folder of the exported head."""
        config = self._config
        config.out.mkdir(parents=True, exist_ok=True)
        position = checkpoint.load(config.out, self._trainee, self._optimizers, config.identity())
        began = saved = time.monotonic()
        began -= position.seconds
        for documents in self._batches(position):
            lr = learning_rate(config, position)
            losses = self._step(documents, lr, position.step)
            position.step += 1
            position.visits += int(losses.rows[0])
            position.seconds = time.monotonic() - began
            quality = None
            if self._rank == 0:
                is_measured = position.step % config.measure_every == 0 or position.visits >= config.visits
                if is_measured:
                    quality = self._measure(position)
                if is_measured or time.monotonic() - saved >= _SAVE_SECONDS:
                    self._save(position)
                    saved = time.monotonic()
            progress = Progress(position, config.visits, lr, losses.means(), quality)
            if self._rank == 0:
                _write_log(config.out / LOG, progress)
            report(progress)
        return config.out / HEAD

    def _batches(self, position: Position) -> Iterator[list[Document]]:
        """Batches from the position on, until there have been visits enough."""
        documents = self._corpus.train
        while True:
            batches = epoch_batches(documents, self._config.batch_tokens, self._config.seed, position.epoch)
            # Every process needs a document of its own.
            batches = [indices for indices in batches if len(indices) >= self._processes]
            if not batches:
                raise InvalidArgumentError(
                    f"batch_tokens is {self._config.batch_tokens}; too few for {self._processes} documents at once"
                )
            while position.batch < len(batches):
                if position.visits >= self._config.visits:
                    return
                indices = batches[position.batch]
                position.batch += 1
                yield [documents[i] for i in indices]
            position.epoch, position.batch = position.epoch + 1, 0

    def _step(self, documents: Sequence[Document], lr: float, number: int) -> Losses:
        """One optimizer step; returns sums over all processes."""
        random = torch.Generator().manual_seed(self._config.seed * 1_000_003 + number)
        ahead = self._trainee.head.lead + self._config.objective.steps
        own = documents[self._rank :: self._processes]
        batch = Batch.of(own, ahead, whole_text=self._config.whole_text).to(self._device)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = lr
        autocast = self._config.dtype != "float32"
        with torch.autocast(self._device.type, getattr(torch, self._config.dtype), enabled=autocast):
            losses: Losses = self._module(batch, random)
        total = self._over_processes(losses)
        # DDP averages the gradients of what each process has of one sum.
        (self._trainee.loss(losses, total.rows) * self._processes).backward()
        nn.utils.clip_grad_norm_(self._trainee.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
        return total

    def _over_processes(self, losses: Losses) -> Losses:
        sums = Losses(**{name: value.detach().clone() for name, value in _tensors(losses)})
        if self._processes > 1:
            for _, value in _tensors(sums):
                dist.all_reduce(value)
        return sums

    def _measure(self, position: Position) -> ChainQuality | None:
        """Drafts on the documents held out, and exports what is better than before."""
        autocast = self._config.dtype != "float32"
        with torch.autocast(self._device.type, getattr(torch, self._config.dtype), enabled=autocast):
            quality = measure_chains(self._trainee, self._corpus.held_out, self._vocabulary)
        # Without greedy documents there is nothing to choose by, and the latest is the best.
        if quality is None or quality.tokens_per_round > position.best:
            export(self._config.out / HEAD, self._trainee, self._vocabulary.cpu(), self._sizes)
            position.best = 0.0 if quality is None else quality.tokens_per_round
        return quality

    def _save(self, position: Position) -> None:
        checkpoint.save(
            self._config.out, self._trainee, self._optimizers, position, self._vocabulary.cpu(), self._config.identity()
        )


def create_head(config: FitConfig, target: ModelConfig) -> Head:
    """An untrained head for a target."""
    sizes = layer_sizes(target)
    match config.scheme:
        case "eagle3":
            return Eagle3Head(sizes, config.layers)
        case "distill":
            return DraftModel(sizes, config.draft_layers)
        case "medusa":
            return MedusaHeads(sizes, config.objective.steps, config.layers)
        case "eagle":
            return MTPHead(sizes, config.layers, norms="none")
    return MTPHead(sizes, config.layers, config.norms)


def create_optimizers(trainee: Trainee, config: FitConfig) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al., 2024) for the matrices of layers, AdamW for norms and an output layer; or AdamW for all."""
    matrices = [p for p in trainee.head.parameters() if p.dim() == 2]
    others = [p for p in trainee.parameters() if p.dim() < 2 or p is trainee.output]
    if config.optimizer == "adamw":
        return [torch.optim.AdamW(matrices + others, config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay)]
    # With updates as large as AdamW's, one learning rate serves both.
    muon = torch.optim.Muon(matrices, config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, config.lr, betas=(0.9, 0.95), weight_decay=0.0)]


def learning_rate(config: FitConfig, position: Position) -> float:
    """Rises over the first steps, stays, and falls to 0 over the last part (WSD; Hu et al., arXiv 2404.06395)."""
    rising = min(1.0, (position.step + 1) / max(config.warmup_steps, 1))
    left = 1 - position.visits / config.visits
    falling = min(1.0, left / config.cooldown) if config.cooldown else 1.0
    return config.lr * rising * falling


def _vocabulary(config: FitConfig, manifest: Manifest, vocab_size: int) -> Tensor:
    """The run's draft vocabulary; once chosen it stays, though more text may be captured before the run goes on."""
    size = min(config.draft_vocab, vocab_size)
    kept = checkpoint.load_vocabulary(config.out)
    if kept is not None and len(kept) == size:
        return kept
    counts = _count_answers(config.data, manifest, vocab_size)
    return choose_vocabulary(counts, size, always=_special_tokens(config.target_model))


def _count_answers(folder: Path, manifest: Manifest, vocab_size: int) -> Tensor:
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for path in shard_paths(folder):
        for document in Shard.read(path, manifest.feature_width).split():
            counts += torch.bincount(document.token_ids[document.prompt_length :].long(), minlength=vocab_size)
    return counts


def _special_tokens(folder: Path) -> list[int]:
    """Tokens that no text contains and answers end with."""
    added = load_tokenizer(folder).get_added_tokens_decoder()
    return [i for i, token in added.items() if token.special]


def _tensors(losses: Losses) -> list[tuple[str, Tensor]]:
    return [(name, getattr(losses, name)) for name in Losses.__slots__]


def _write_log(path: Path, progress: Progress) -> None:
    losses = {name: [round(x, 5) for x in value.tolist()] for name, value in _tensors(progress.losses)}
    line: dict[str, Any] = asdict(progress.position) | {"lr": progress.lr} | losses
    if progress.quality is not None:
        line["quality"] = asdict(progress.quality)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
