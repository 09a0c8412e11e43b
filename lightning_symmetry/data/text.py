"""Text for language models: the standard library's source text, or any text files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lightning_symmetry.data._checks import check_at_least, check_choice, check_fraction
from lightning_symmetry.data.loaders import SPLITS, Split, SplitDataModule
from lightning_symmetry.data.text_cache import on_disk
from lightning_symmetry.data.text_corpus import Corpus, Text, in_memory
from lightning_symmetry.data.text_files import Span, whole
from lightning_symmetry.data.text_sources import text_files
from lightning_symmetry.data.text_splits import divide
from lightning_symmetry.data.text_tokens import Bytes, Vocabulary
from lightning_symmetry.data.text_windows import TokenWindows

DEFAULT_WORDS = 10_000


class TextData(SplitDataModule):
    """Windows of text and the tokens that follow: batches of inputs and targets, both int64 of shape (B, context).

    Sources:

    - `"stdlib"`: the modules at the top level of Python's standard library, about 4.7 MB. It needs no download. The
      text depends on the Python version, so compare numbers within one version only;
    - a text file;
    - a folder of text files (.txt, .text, .tokens, .raw, .md, .rst), which are found in its folders too. Files with
      train, valid (val, validation, dev) or test in their names, between dots, hyphens or underscores, are the splits,
      as `wiki.train.tokens` and `test.txt`, and so are files in folders train/, valid/, test/; others are not read
      then. Without a file for training there are no splits, and all files are divided;
    - the folder of LM1B: `training-monolingual.tokenized.shuffled/news.en-*` for training, and of
      `heldout-monolingual.tokenized.shuffled/news.en.heldout-*` the first, 00000, for testing and the others for
      validation.

    Splits that a source does not have are held out from its training text: files are laid end to end in an order drawn
    by `split_seed` and cut, at ends of lines, in contiguous parts for training, validation and testing.

    Training windows come in an order drawn anew every epoch, all others in fixed order. Within a split every token but
    the first is the target of one window; up to `context - 1` tokens at the end, which fill no window, are left out.

    The tokens are bytes, or words between white space with `<eos>` for each end of a line. Words are the most frequent
    ones of the training split, all others are `<unk>`.

    There is no validation split if `val_fraction` is 0 and the source has none: then `val_dataloader` returns the
    **test** windows, so do not choose a checkpoint by it and then report the test result.

    Source: Chelba et al. (2014) for LM1B, on which Exploring Low Rank Training of Deep Neural Networks (2022) trains
    its Transformer; Merity et al. (2017) for WikiText.
    """

    def __init__(
        self,
        source: str = "stdlib",
        tokens: Literal["byte", "word"] = "byte",
        context: int = 128,
        batch_size: int = 64,
        vocab_size: int | None = None,
        val_fraction: float = 0.05,
        test_fraction: float = 0.05,
        split_seed: int = 0,
        max_tokens: int | None = None,
        num_workers: int = 0,
        eval_batch_size: int = 64,
        cache_dir: str | None = None,
    ) -> None:
        """Choose the text; nothing is read yet.

        Args:
            source: "stdlib", or the path of a file or folder, see above.
            tokens: What the text is cut into.
            context: Tokens of a window.
            batch_size: Windows in a training batch of one process.
            vocab_size: Most words of the vocabulary, with `<unk>` and `<eos>`; None for 10,000. There are always 256
                bytes.
            val_fraction: Fraction of the text that is held out for validation, where the source has no such split.
            test_fraction: Fraction of the text that is held out for testing, where the source has no such split.
            split_seed: Seed of the order in which files are divided; one file is divided in its own.
            max_tokens: Most tokens of the training split, from its beginning; the rest is not read. None for all.
            num_workers: Worker processes of each loader. 0 is fast.
            eval_batch_size: Windows in a batch of the validation, test and evaluation loaders.
            cache_dir: Folder where tokens are kept and mapped to memory from: for text that is too large for memory,
                or long to read. None holds them in memory, 1 byte a byte, 2 bytes a word of a vocabulary of up to
                65,536 and else 4.

        Raises:
            ValueError: If an argument is out of range, or the fractions leave nothing for training.
        """
        super().__init__(batch_size, eval_batch_size, num_workers)
        self.source = str(source)
        self.tokens = check_choice("tokens", tokens, ("byte", "word"))
        self.context = check_at_least("context", context, 1)
        if vocab_size is not None and tokens == "byte":
            raise ValueError(
                f'`vocab_size` is for words, but got {vocab_size} with tokens="byte": there are 256 bytes.'
            )
        self._most_words = DEFAULT_WORDS if vocab_size is None else check_at_least("vocab_size", vocab_size, 3)
        self.val_fraction = check_fraction("val_fraction", val_fraction, zero=True)
        self.test_fraction = check_fraction("test_fraction", test_fraction, zero=False)
        if val_fraction + test_fraction >= 1:
            raise ValueError(
                "Expected arguments `test_fraction` and `val_fraction` to add up to less than 1, but got "
                f"{test_fraction} and {val_fraction}."
            )
        self.split_seed = split_seed
        self.max_tokens = None if max_tokens is None else check_at_least("max_tokens", max_tokens, 1)
        self.cache_dir = None if cache_dir is None else Path(cache_dir)
        self._corpus: Corpus | None = None
        self.save_hyperparameters(logger=False)

    @property
    def vocab_size(self) -> int:
        """Number of tokens: 256, or the words of the vocabulary, for which the text is read if it was not yet."""
        return self._vocabulary.size

    @property
    def num_tokens(self) -> dict[str, int]:
        """Tokens of each split."""
        return {split: len(self._loaded().tokens[split]) for split in SPLITS}

    def encode(self, text: str) -> Tensor:
        """Turn text into tokens.

        Args:
            text: Any text.

        Returns:
            Tokens, int64 of shape (N,).
        """
        return torch.from_numpy(self._vocabulary.encode(text).astype(np.int64))

    def decode(self, ids: Tensor) -> str:
        """Turn tokens into text: where bytes are not UTF-8 it has the replacement character, words have one space.

        Args:
            ids: Tokens, of shape (N,).

        Returns:
            The text.
        """
        return self._vocabulary.decode(torch.as_tensor(ids).cpu().numpy())

    @property
    def _vocabulary(self) -> Vocabulary:
        return Bytes() if self.tokens == "byte" else self._loaded().vocabulary

    def prepare_data(self) -> None:
        """Look for the text and, with a `cache_dir`, write the tokens if they are not there.

        Raises:
            FileNotFoundError: If there is no text.
        """
        text = self._text()
        if self.cache_dir is not None:
            self._read(text)

    def _dataset(self, split: Split, training: bool = False) -> TokenWindows:
        return TokenWindows(self._loaded().tokens[split], self.context)

    def _loaded(self) -> Corpus:
        if self._corpus is None:
            corpus = self._read(self._text())
            corpus.tokens.setdefault("val", corpus.tokens["test"])
            self._require_windows(corpus)
            self._corpus = corpus
        return self._corpus

    def _text(self) -> Text:
        """Find and divide the files."""
        files = text_files(self.source)
        if not any(path.stat().st_size for path in files["train"]):
            raise ValueError(f"The training text of {self.source} is empty: {', '.join(map(str, files['train'][:3]))}.")
        fractions = {"val": self.val_fraction, "test": self.test_fraction}
        held_out = {split: share for split, share in fractions.items() if split not in files and share > 0}
        spans: dict[str, list[Span]] = {split: [whole(path) for path in found] for split, found in files.items()}
        spans.update(divide(files["train"], held_out, self.split_seed))
        return Text(spans, self.tokens, self._most_words, self.max_tokens)

    def _read(self, text: Text) -> Corpus:
        if self.cache_dir is None:
            return in_memory(text)
        return on_disk(text, self.cache_dir, f"{Path(self.source).resolve().stem}-{self.tokens}")

    def _require_windows(self, corpus: Corpus) -> None:
        for split, tokens in corpus.tokens.items():
            if len(tokens) <= self.context:
                raise ValueError(
                    f"The {split} split of {self.source} has {len(tokens):,} tokens, but a window has {self.context:,} "
                    "and one to follow. Give more text or a larger fraction to the split, or lower `context`."
                )
