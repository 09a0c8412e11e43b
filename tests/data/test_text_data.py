"""Windows of text: what they cover, their loaders, and a fit."""

from __future__ import annotations

import math
import pickle
from collections import Counter

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from distributed import SpawnedProcesses
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import RandomSampler, SequentialSampler
from torchmetrics.text import Perplexity

from lightning_symmetry import LinearInterpolation, SupervisedModule, TextData, TransformerLM, token_cross_entropy
from lightning_symmetry.data import TokenWindows

SPLITS = ("train", "val", "test")
LINES = [f"line {i} of the text has word{i % 97} and a café\n" for i in range(3000)]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("".join(LINES), encoding="utf-8")
    return path


def gather(loader):
    return tuple(torch.cat(parts) for parts in zip(*loader, strict=True))


def stream(loader):
    """Return the tokens that the windows are cut from, up to the last target."""
    inputs, targets = gather(loader)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs[1:, 0], targets[:-1, -1])
    return torch.cat([inputs[0, :1], targets.flatten()])


@given(st.integers(0, 60), st.integers(1, 12))
def test_every_token_but_the_first_is_a_target_once(count, context):
    windows = TokenWindows(np.arange(count, dtype=np.uint8), context)
    assert len(windows) == max(0, count - 1) // context
    assert len(list(windows)) == len(windows)
    if len(windows):
        inputs, targets = windows.__getitems__(range(len(windows)))
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.shape == targets.shape == (len(windows), context)
        assert inputs.flatten().tolist() == list(range(len(windows) * context))
        assert torch.equal(targets, inputs + 1)
        assert torch.equal(windows[-1][0], inputs[-1])
    assert count - 1 - len(windows) * context < context
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_windows_of_bytes_are_the_text(file):
    data = TextData(str(file), context=32)
    parts = [stream(data.eval_dataloader(split)) for split in SPLITS]
    left = [data.num_tokens[split] - len(part) for split, part in zip(SPLITS, parts, strict=True)]
    assert all(0 <= count < 32 for count in left)
    assert sum(data.num_tokens.values()) == file.stat().st_size
    text, position = file.read_bytes(), 0
    for part, rest in zip(parts, left, strict=True):
        assert part.tolist() == list(text[position : position + len(part)])
        position += len(part) + rest
    whole = data._corpus.tokens
    assert "".join(data.decode(whole[split]) for split in SPLITS) == "".join(LINES)
    assert all(data.decode(whole[split]).startswith("line") for split in SPLITS)
    for split, share in zip(SPLITS, (0.9, 0.05, 0.05), strict=True):
        assert data.num_tokens[split] == pytest.approx(share * len(text), abs=50)  # the length of a line


def test_no_line_is_in_two_splits(tmp_path):
    for i in range(12):
        (tmp_path / f"{i:02}.txt").write_text("".join(LINES[i * 250 : (i + 1) * 250]), encoding="utf-8")
    data = TextData(str(tmp_path), val_fraction=0.2, test_fraction=0.3)
    data.setup()
    lines = [set(data.decode(data._corpus.tokens[split]).splitlines()) for split in SPLITS]
    assert sum(map(len, lines)) == len(set.union(*lines)) == 3000
    other = TextData(str(tmp_path), val_fraction=0.2, test_fraction=0.3, split_seed=1)
    assert set(other.decode(stream(other.test_dataloader())).splitlines()) - lines[2]


@pytest.mark.parametrize("size", [3, 50, None])
def test_vocabulary_is_that_of_the_training_lines(file, size):
    data = TextData(str(file), "word", context=16, vocab_size=size)
    assert sum(data.num_tokens.values()) == 11 * 3000  # a line has ten words and its end
    ends = np.cumsum([data.num_tokens[split] // 11 for split in SPLITS])
    lines = dict(zip(SPLITS, np.split(np.array(LINES), ends[:-1]), strict=True))
    counts = Counter(word for line in lines["train"] for word in line.split())
    known = [word for word, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))][: (size or 10_000) - 2]
    assert data.vocab_size == len(known) + 2
    unknown = data.encode("never-seen").item()
    for split in SPLITS:
        expected = [[w if w in known else "<unk>" for w in line.split()] for line in lines[split]]
        text = data.decode(data._corpus.tokens[split])
        assert [line.split() for line in text.splitlines()] == expected
        share = np.mean([word == "<unk>" for line in expected for word in [*line, "<eos>"]])
        assert (data._corpus.tokens[split] == unknown).mean() == pytest.approx(share)
    assert torch.equal(data.encode(data.decode(data.encode(LINES[0]))), data.encode(LINES[0]))


@pytest.mark.parametrize("tokens", ["byte", "word"])
def test_max_tokens_is_a_beginning_of_the_training_text_only(file, tokens):
    short, long = (TextData(str(file), tokens, context=16, max_tokens=count) for count in (1001, None))
    assert short.num_tokens["train"] == 1001
    assert long.decode(long._loaded().tokens["train"]).startswith(short.decode(short._corpus.tokens["train"])[:-9])
    if tokens == "byte":
        assert {s: short.num_tokens[s] for s in SPLITS[1:]} == {s: long.num_tokens[s] for s in SPLITS[1:]}
        assert torch.equal(gather(short.test_dataloader())[0], gather(long.test_dataloader())[0])
    else:
        assert short.vocab_size < long.vocab_size


def test_splits_of_a_folder_are_taken_as_they_are(tmp_path):
    for name, lines in {"wiki.train.tokens": LINES[:100], "wiki.valid.tokens": LINES[100:120]}.items():
        (tmp_path / name).write_text("".join(lines))
    data = TextData(str(tmp_path), context=16, test_fraction=0.2)
    data.setup()
    texts = [data.decode(data._corpus.tokens[split]) for split in SPLITS]
    assert texts[1] == "".join(LINES[100:120])
    assert texts[0] + texts[2] == "".join(LINES[:100])
    assert len(texts[2]) / len(texts[0]) == pytest.approx(0.25, abs=0.02)
    (tmp_path / "wiki.test.tokens").write_text("".join(LINES[120:150]))
    data = TextData(str(tmp_path), context=16)
    data.setup()
    texts = [data.decode(data._corpus.tokens[split]) for split in SPLITS]
    assert texts == ["".join(LINES[a:b]) for a, b in ((0, 100), (100, 120), (120, 150))]


def test_lm1b_folder(tmp_path):
    train, heldout = "training-monolingual.tokenized.shuffled", "heldout-monolingual.tokenized.shuffled"
    for folder, names in (
        (train, ["news.en-00001-of-00100", "news.en-00002-of-00100"]),
        (heldout, [f"news.en.heldout-0000{i}-of-00050" for i in range(3)]),
    ):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text(f"{name} sentence one\nand two\n" * 9)
    data = TextData(str(tmp_path), "word", context=8)
    data.prepare_data()
    # Three words, two words, and two ends of lines, nine times a file.
    assert data.num_tokens == {"train": 2 * 63, "val": 2 * 63, "test": 63}
    assert data.vocab_size == 2 + 6
    assert data.decode(data._corpus.tokens["test"]) == "<unk> sentence one\nand two\n" * 9


def test_without_a_validation_fraction_the_test_windows_validate(file):
    data = TextData(str(file), context=16, val_fraction=0)
    val, test = gather(data.val_dataloader()), gather(data.test_dataloader())
    assert torch.equal(val[0], test[0])
    assert data.num_tokens["train"] + data.num_tokens["test"] == file.stat().st_size


def test_only_training_is_in_an_order_drawn_anew(file):
    data = TextData(str(file), context=16, batch_size=1000, eval_batch_size=3000)
    loader, fixed = data.train_dataloader(), data.eval_dataloader("train")
    assert isinstance(loader.sampler, RandomSampler)
    (once, again), plain = (gather(loader)[0] for _ in range(2)), gather(fixed)[0]
    assert not torch.equal(once, again)
    assert sorted(once.tolist()) == sorted(again.tolist()) == sorted(plain.tolist())
    assert [len(inputs) for inputs, _ in fixed] == [3000, 3000, len(plain) - 6000]
    for split in SPLITS:
        assert isinstance(data.eval_dataloader(split).sampler, SequentialSampler)
        assert torch.equal(gather(data.eval_dataloader(split))[0], gather(data.eval_dataloader(split))[0])
    torch.manual_seed(3)
    seeded = gather(loader)[0]
    torch.manual_seed(3)
    assert torch.equal(seeded, gather(loader)[0])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_global_random_states_stay(file, tmp_path, num_workers):
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    for cache_dir in (None, str(tmp_path / "c")):
        data = TextData(str(file), "word", context=16, num_workers=num_workers, cache_dir=cache_dir)
        data.prepare_data()
        data.setup()
        for split in SPLITS:
            for _ in data.eval_dataloader(split):
                pass
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])


@pytest.mark.parametrize("cached", [False, True])
def test_workers_give_the_same_windows(file, tmp_path, cached):
    cache_dir = str(tmp_path / "c") if cached else None
    loaders = [TextData(str(file), context=16, num_workers=n, cache_dir=cache_dir).test_dataloader() for n in (0, 2)]
    expected = gather(loaders[0])
    for loader in (loaders[1], pickle.loads(pickle.dumps(loaders[1]))):
        for part, other in zip(gather(loader), expected, strict=True):
            assert torch.equal(part, other)


def test_loads_once(file):
    data = TextData(str(file))
    data.setup("fit")
    corpus = data._corpus
    data.setup("test")
    assert data._corpus is corpus


def test_bytes_need_no_text():
    data = TextData("nowhere.txt")
    assert data.vocab_size == 256
    assert data.decode(data.encode("naïve\n")) == "naïve\n"


def test_stdlib_is_there():
    data = TextData(tokens="word", vocab_size=5000)
    data.prepare_data()
    assert data.vocab_size == 5000
    assert min(data.num_tokens.values()) > 10_000
    assert "def" in data._corpus.vocabulary.words[:30]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": "char"}, r"`tokens` to be one of \['byte', 'word'\], but got 'char'"),
        ({"context": 0}, "`context` to be an integer of at least 1, but got 0"),
        ({"batch_size": 0}, "`batch_size` to be an integer of at least 1, but got 0"),
        ({"eval_batch_size": 0}, "`eval_batch_size` to be an integer of at least 1, but got 0"),
        ({"num_workers": -1}, "`num_workers` to be an integer of at least 0, but got -1"),
        ({"max_tokens": 0}, "`max_tokens` to be an integer of at least 1, but got 0"),
        ({"tokens": "word", "vocab_size": 2}, "`vocab_size` to be an integer of at least 3, but got 2"),
        ({"vocab_size": 100}, '`vocab_size` is for words, but got 100 with tokens="byte": there are 256 bytes'),
        ({"val_fraction": -0.1}, r"`val_fraction` to be a fraction in \[0, 1\), but got -0.1"),
        ({"test_fraction": 0.0}, r"`test_fraction` to be a fraction in \(0, 1\), but got 0.0"),
        ({"val_fraction": 0.5, "test_fraction": 0.5}, "add up to less than 1, but got 0.5 and 0.5"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        TextData(**arguments)


def test_unknown_split(file):
    with pytest.raises(ValueError, match=r"`split` to be one of .*'train', 'val'.* but got 'valid'"):
        TextData(str(file)).eval_dataloader("valid")


def test_missing_text_is_missed_by_prepare_data(tmp_path):
    data = TextData(str(tmp_path / "nowhere.txt"))
    for load in (data.prepare_data, data.setup):
        with pytest.raises(FileNotFoundError, match=r"Found no text at .*nowhere.txt: looked for"):
            load()


def test_empty_text(tmp_path):
    (tmp_path / "empty.txt").touch()
    for source in (tmp_path, tmp_path / "empty.txt"):
        with pytest.raises(ValueError, match=r"The training text of .* is empty: .*empty.txt"):
            TextData(str(source)).setup()


@pytest.mark.parametrize(("options", "split"), [({"context": 8000}, "val"), ({"max_tokens": 9}, "train")])
def test_split_of_less_than_a_window(file, options, split):
    with pytest.raises(ValueError, match=rf"The {split} split of .*lines.txt has [\d,]+ tokens, .* lower `context`"):
        TextData(str(file), **options).setup()


def test_words_of_another_encoding(tmp_path):
    (tmp_path / "latin.txt").write_bytes("".join(LINES).encode("latin-1"))
    with pytest.raises(ValueError, match=r'latin.txt is not UTF-8: byte 0xe9 at \d+.* pass `tokens="byte"`'):
        TextData(str(tmp_path), "word").setup()
    assert TextData(str(tmp_path)).num_tokens["train"] > 0


def model(vocab_size, context):
    net = TransformerLM(vocab_size, context, width=16, depth=1, heads=2)
    return SupervisedModule(
        net,
        token_cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        metrics={"perplexity": Perplexity()},
    )


def trainer(tmp_path, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return pl.Trainer(accelerator="cpu", default_root_dir=tmp_path, **quiet, **options)


def test_fit_validate_test_and_checkpoint(file, tmp_path):
    pl.seed_everything(0, verbose=False)
    data = TextData(str(file), "word", context=11, batch_size=128)
    path = LinearInterpolation(num_points=3, split="test", progress=False)
    fitted = trainer(tmp_path, devices=1, max_epochs=3, callbacks=[path])
    module = model(data.vocab_size, 11)
    fitted.fit(module, datamodule=data)
    results = {
        "val": fitted.validate(module, datamodule=data, verbose=False)[0],
        "test": fitted.test(module, datamodule=data, verbose=False)[0],
    }
    for split, result in results.items():
        assert result[f"{split}/perplexity"] == pytest.approx(math.exp(result[f"{split}/loss"]), rel=1e-5)
        assert result[f"{split}/loss"] < math.log(data.vocab_size) / 2
    assert path.result.loss[-1].item() == pytest.approx(results["test"]["test/loss"], rel=1e-5)

    restored = TextData.load_from_checkpoint(fitted.checkpoint_callback.best_model_path)
    assert restored.hparams == data.hparams


class Adder(pl.LightningModule):
    """Adds up the targets that all processes see."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def _step(self, batch, name):
        total = batch[1].double().sum()
        self.log(name, total, on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True, batch_size=1)
        return self.weight * 0

    def training_step(self, batch, _):
        return self._step(batch, "train")

    def validation_step(self, batch, _):
        return self._step(batch, "val")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_processes_divide_the_windows_among_themselves(file, tmp_path):
    # A context that gives even numbers of windows: nobody gets one twice.
    sizes = TextData(str(file)).num_tokens
    context = next(c for c in range(60, 600) if all((sizes[s] - 1) // c % 2 == 0 for s in ("train", "val")))
    data = TextData(str(file), context=context, batch_size=100, cache_dir=str(tmp_path / "c"))
    both = trainer(tmp_path, devices=2, strategy=SpawnedProcesses(), max_epochs=1, enable_checkpointing=False)
    both.fit(Adder(), datamodule=data)
    for split in ("train", "val"):
        assert both.callback_metrics[split] == gather(data.eval_dataloader(split))[1].double().sum()


@pytest.mark.filterwarnings("ignore")
def test_works_from_the_command_line(tmp_path):
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    cli = LightningCLI(
        Adder,
        TextData,
        run=False,
        save_config_callback=None,
        trainer_defaults={"logger": False, "default_root_dir": str(tmp_path)},
        args=["--data.tokens=word", "--data.vocab_size=99", "--trainer.accelerator=cpu"],
    )
    assert cli.datamodule.vocab_size == 99


def test_wikitext_2_has_the_known_numbers_of_tokens(real_data):
    folder = real_data / "text" / "wikitext-2"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    data = TextData(str(folder / "valid.txt"), "word")
    assert sum(data.num_tokens.values()) == 217_646  # Merity et al. (2017), table 1
    data = TextData(str(folder / "test.txt"), "word")
    assert sum(data.num_tokens.values()) == 245_569
