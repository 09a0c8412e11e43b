"""A decoder-only Transformer language model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INIT_STD = 0.02


class CausalAttention(nn.Module):
    r"""Multi-head self-attention in which a position sees itself and earlier ones.

    .. math:: \mathrm{head}_h = \mathrm{softmax}\left(\frac{Q_h K_h^\top}{\sqrt{d}} + M\right) V_h, \qquad
        M_{ts} = 0 \text{ for } s \le t \text{ and } -\infty \text{ else,}

    for queries, keys and values that are linear in the input and d entries a head; ``out`` maps the heads, side by
    side. The four maps are plain linear layers, so that whatever converts linear layers finds them.

    Args:
        width: Entries of a position.
        heads: Number of heads, which divides the width.
        dropout: Probability with which an attention weight is dropped in training.

    Source: Vaswani et al., Attention Is All You Need (2017), section 3.2.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(N, T, width)``."""
        query, key, value = (self._by_head(layer(input)) for layer in (self.query, self.key, self.value))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.out(mixed.transpose(-3, -2).flatten(-2))

    def _by_head(self, hidden: Tensor) -> Tensor:
        """Map ``(N, T, width)`` to ``(N, heads, T, width / heads)``."""
        return hidden.unflatten(-1, (self.heads, -1)).transpose(-3, -2)


class TransformerBlock(nn.Module):
    r"""Pre-norm block: `x + attention(norm(x))`, then `x + mlp(norm(x))`.

    Args:
        width: Entries of a position.
        heads: Number of heads.
        hidden: Units of the MLP, which has one hidden layer and GELU.
        dropout: Probability of dropout of attention weights and of what is added to x.
    """

    def __init__(self, width: int, heads: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.activation = nn.GELU()
        self.down = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(N, T, width)``."""
        hidden = input + self.dropout(self.attention(self.attention_norm(input)))
        return hidden + self.dropout(self.down(self.activation(self.up(self.mlp_norm(hidden)))))


class TransformerLM(nn.Module):
    r"""Pre-norm, decoder-only Transformer: the logits of each next token, given the tokens up to it.

    The embedding of a token and that of its position are added and go through the blocks (:class:`TransformerBlock`),
    a last LayerNorm, and a linear head without bias. With ``tied`` the head's weight is the embedding's table, the same
    parameter, so that logit v is the inner product of a position with the embedding of token v.

    Weights and embeddings start from a normal distribution of standard deviation 0.02; of the two maps of each block
    that add to x, from one of :math:`0.02 / \sqrt{2 \cdot \mathrm{depth}}`. Biases start at zero.

    Args:
        vocab_size: Number of tokens.
        context: Most positions of an input.
        width: Entries of a position.
        depth: Number of blocks.
        heads: Heads of each attention; they divide the width.
        hidden: Units of each MLP; ``4 * width`` by default.
        dropout: Probability of dropout of embeddings, attention weights and what blocks add.
        tied: Whether the head shares the embedding's table.

    Raises:
        ValueError: If a size is less than 1, ``heads`` does not divide the width, or ``dropout`` is no probability
            below 1.

    Source: Vaswani et al. (2017); the layout and initialisation are those of Radford et al., Language Models are
    Unsupervised Multitask Learners (2019), section 2.3. Exploring Low Rank Training of Deep Neural Networks (2022)
    factorises a Transformer on LM1B.
    """

    def __init__(
        self,
        vocab_size: int,
        context: int = 128,
        width: int = 256,
        depth: int = 4,
        heads: int = 4,
        hidden: int | None = None,
        dropout: float = 0.0,
        tied: bool = True,
    ) -> None:
        super().__init__()
        hidden = 4 * width if hidden is None else hidden
        sizes = {
            "vocab_size": vocab_size,
            "context": context,
            "width": width,
            "depth": depth,
            "heads": heads,
            "hidden": hidden,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"Expected `{name}` to be at least 1 but got {size}.")
        if width % heads:
            raise ValueError(f"Expected `heads` to divide `width` but got {heads} heads and width {width}.")
        if not 0 <= dropout < 1:
            raise ValueError(f"Expected `dropout` to be in [0, 1) but got {dropout}.")
        self.context = context
        self.embedding = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, hidden, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self._initialise()
        if tied:
            self.head.weight = self.embedding.weight

    def _initialise(self) -> None:
        """Draw the weights as GPT-2 does."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        # Each block adds twice to x. Sums of 2 depth independent terms keep the scale of one when each is divided by
        # the root of their number; and a small table keeps the logits of a tied head, and so the first loss, small.
        for block in self.blocks:
            for layer in (block.attention.out, block.down):
                nn.init.normal_(layer.weight, std=INIT_STD * (2 * len(self.blocks)) ** -0.5)

    @property
    def example_input_array(self) -> Tensor:
        """An input of the right shape and type."""
        return torch.zeros(2, self.context, dtype=torch.int64)

    def forward(self, input: Tensor) -> Tensor:
        """Map tokens ``(N, T)`` to logits ``(N, T, vocab_size)``; position t holds those of the token at t + 1.

        Raises:
            ValueError: If there are more positions than ``context``.
        """
        length = input.shape[-1]
        if length > self.context:
            raise ValueError(
                f"The model has {self.context} positions, but the input of shape {tuple(input.shape)} has {length}: "
                "build it with a larger `context` or cut the input."
            )
        positions = torch.arange(length, device=input.device)
        hidden = self.dropout(self.embedding(input) + self.positions(positions))
        return self.head(self.norm(self.blocks(hidden)))


def token_cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    r"""Return the mean cross entropy of next tokens, in nats; the perplexity is its exponential.

    .. math:: -\frac{1}{N T} \sum_{n,t} \log \mathrm{softmax}(z_{nt})_{y_{nt}}

    Args:
        logits: z, of shape ``(N, T, V)``.
        tokens: y, indices of shape ``(N, T)``.

    Returns:
        A scalar, as ``SupervisedModule(net, loss=token_cross_entropy)`` takes it.
    """
    return F.cross_entropy(logits.flatten(0, -2), tokens.flatten())
