"""What the attention of one layer weighs, keeps per token and reads per step.

Five kinds cover the families of :mod:`moesim.specs.families`. All counts are in values (weights or cache entries);
:class:`~moesim.specs.model.ModelSpec` multiplies by bits. Norms, biases of inner projections that are under 0.1 % of a
block, and rotary tables are left out. A block answers four questions:

* ``n_parameters(hidden_size)``: weights read in every step;
* ``kv_values_per_token``: cache entries that one token inside ``window`` adds and that a later step reads;
* ``window``: tokens that a step looks back on at full resolution, None for all of them;
* ``kv_values_read(n_context_tokens)`` and ``kv_values_kept(n_context_tokens)``: the exact totals.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from moesim.errors import ConfigError


class _Block(BaseModel):
    """Common ground of all kinds.

    Parameters
    ----------
    n_blocks : int
        Attention blocks of this shape inside one layer (LongCat has two).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    n_blocks: int = Field(default=1, ge=1)


class GroupedQueryAttention(_Block):
    """Multi-head, grouped-query or multi-query attention, with or without a sliding window.

    Parameters: H(n_q + 2 n_kv) d + n_q d H, twice the query part with an output gate, biases where ``has_bias``.
    A chunked window (Llama 4) is treated as a sliding one of the chunk's size: an upper bound of what it reads.
    """

    kind: Literal["gqa"] = "gqa"
    n_heads: int = Field(ge=1)
    n_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    window: int | None = Field(default=None, ge=1)
    has_bias: bool = False
    has_output_gate: bool = False
    shares_kv_projection: bool = False

    def n_parameters(self, hidden_size: int) -> int:
        """Weights of the query, key, value and output projections."""
        n_query = self.n_heads * self.head_dim
        n_key_value = (1 if self.shares_kv_projection else 2) * self.n_kv_heads * self.head_dim
        n_inward = n_query * (2 if self.has_output_gate else 1) + n_key_value
        n_biases = n_inward if self.has_bias else 0
        return self.n_blocks * (hidden_size * (n_inward + n_query) + n_biases)

    @property
    def kv_values_per_token(self) -> int:
        """Keys and values: 2 n_kv d."""
        return self.n_blocks * 2 * self.n_kv_heads * self.head_dim

    def kv_values_read(self, n_context_tokens: int) -> int:
        """Every token inside the window, once."""
        return self.kv_values_per_token * _reach(n_context_tokens, self.window)

    def kv_values_kept(self, n_context_tokens: int) -> int:
        """Keep what a step reads: the cache drops what left the window."""
        return self.kv_values_read(n_context_tokens)


class LatentAttention(_Block):
    """Multi-head latent attention, optionally with a sparse indexer (DeepSeek-V2/V3, GLM-5, LongCat).

    Parameters: queries H r_q + r_q n (d_nope + d_rope) (or H n (d_nope + d_rope) without a query rank), latent
    H (r_kv + d_rope) + r_kv n (d_nope + d_v), output n d_v H; the indexer adds r_q n_i d_i + H d_i + H n_i.
    One token keeps the latent r_kv + d_rope; with an indexer also d_i, and a step scores all tokens on d_i but reads
    the latent of ``index_topk`` of them only. Every layer is given its own indexer, also where a checkpoint lets
    layers share one.
    """

    kind: Literal["mla"] = "mla"
    n_heads: int = Field(ge=1)
    q_lora_rank: int | None = Field(default=None, ge=1)
    kv_lora_rank: int = Field(ge=1)
    qk_nope_head_dim: int = Field(ge=1)
    qk_rope_head_dim: int = Field(ge=1)
    v_head_dim: int = Field(ge=1)
    index_n_heads: int = Field(default=0, ge=0)
    index_head_dim: int = Field(default=0, ge=0)
    index_topk: int | None = Field(default=None, ge=1)

    @property
    def window(self) -> None:
        """Every earlier token stays in reach."""
        return

    def n_parameters(self, hidden_size: int) -> int:
        """Weights of the query, latent, output and indexer projections."""
        n_query = self.n_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        rank = self.q_lora_rank or hidden_size
        queries = rank * n_query + (hidden_size * rank if self.q_lora_rank else 0)
        latent = hidden_size * (self.kv_lora_rank + self.qk_rope_head_dim)
        latent += self.kv_lora_rank * self.n_heads * (self.qk_nope_head_dim + self.v_head_dim)
        output = self.n_heads * self.v_head_dim * hidden_size
        indexer = self.index_n_heads * (rank * self.index_head_dim + hidden_size) + hidden_size * self.index_head_dim
        return self.n_blocks * (queries + latent + output + indexer)

    @property
    def kv_values_per_token(self) -> int:
        """Latent, rotary key and indexer key: r_kv + d_rope + d_i."""
        return self.n_blocks * (self.kv_lora_rank + self.qk_rope_head_dim + self.index_head_dim)

    def kv_values_read(self, n_context_tokens: int) -> int:
        """Indexer keys of all tokens, latents of the chosen ones (of all without an indexer)."""
        n_chosen = _reach(n_context_tokens, self.index_topk)
        latents = n_chosen * (self.kv_lora_rank + self.qk_rope_head_dim)
        return self.n_blocks * (n_context_tokens * self.index_head_dim + latents)

    def kv_values_kept(self, n_context_tokens: int) -> int:
        """All tokens keep all their entries."""
        return self.kv_values_per_token * n_context_tokens


class CompressedAttention(_Block):
    """DeepSeek-V4 attention: one shared key-value head, a short window, and compressed older tokens.

    Parameters: H r_q + r_q n d + H d + n d r_o + g r_o H. ``compress_ratio`` 0 is the window alone; with ``index_topk``
    (ratio 4) the compressor adds 4 H d and the indexer 4 H d_i + r_q n_i d_i + H n_i; without it (ratio 128) the
    compressor adds 2 H d. A step reads the window, all indexer keys, and the chosen compressed entries (all of them
    without an indexer); partly filled compression buffers are left out.
    """

    kind: Literal["compressed"] = "compressed"
    n_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    q_lora_rank: int = Field(ge=1)
    o_groups: int = Field(ge=1)
    o_lora_rank: int = Field(ge=1)
    window: int = Field(ge=1)
    compress_ratio: int = Field(default=0, ge=0)
    index_n_heads: int = Field(default=0, ge=0)
    index_head_dim: int = Field(default=0, ge=0)
    index_topk: int | None = Field(default=None, ge=1)

    def n_parameters(self, hidden_size: int) -> int:
        """Weights of the query, key-value and output projections, compressor and indexer."""
        n_query = self.n_heads * self.head_dim
        core = (hidden_size + n_query) * self.q_lora_rank + hidden_size * self.head_dim
        output = n_query * self.o_lora_rank + self.o_groups * self.o_lora_rank * hidden_size
        if self.compress_ratio == 0:
            return self.n_blocks * (core + output)
        # Overlapping compression windows (those with an indexer) project to twice the head width.
        n_streams = 4 if self.index_topk else 2
        compressor = n_streams * hidden_size * self.head_dim
        indexer = n_streams * hidden_size * self.index_head_dim
        indexer += self.index_n_heads * (self.q_lora_rank * self.index_head_dim + hidden_size)
        return self.n_blocks * (core + output + compressor + (indexer if self.index_topk else 0))

    @property
    def kv_values_per_token(self) -> int:
        """Key and value are one vector of d inside the window."""
        return self.n_blocks * self.head_dim

    def _n_compressed(self, n_context_tokens: int) -> int:
        """Compressed entries that exist after so many tokens."""
        return n_context_tokens // self.compress_ratio if self.compress_ratio else 0

    def kv_values_read(self, n_context_tokens: int) -> int:
        """Window, indexer keys and chosen compressed entries."""
        n_compressed = self._n_compressed(n_context_tokens)
        n_chosen = _reach(n_compressed, self.index_topk)
        n_vectors = _reach(n_context_tokens, self.window) + n_chosen
        index_values = n_compressed * self.index_head_dim if self.index_topk else 0
        return self.n_blocks * (n_vectors * self.head_dim + index_values)

    def kv_values_kept(self, n_context_tokens: int) -> int:
        """Window, all compressed entries and their indexer keys."""
        width = self.head_dim + (self.index_head_dim if self.index_topk else 0)
        recent = _reach(n_context_tokens, self.window) * self.head_dim
        return self.n_blocks * (recent + self._n_compressed(n_context_tokens) * width)


class LinearAttention(_Block):
    """Gated delta-rule linear attention (Qwen3-Next): a state of fixed size instead of a cache.

    Parameters: H (2 K + 2 V) + 2 H n_v + conv (2 K + V) + V H, with K = n_k d_k and V = n_v d_v. The state has
    n_v d_k d_v values, counted at the cache's bits although implementations keep it wider; a step reads it once,
    however long the context.
    """

    kind: Literal["linear"] = "linear"
    n_key_heads: int = Field(ge=1)
    n_value_heads: int = Field(ge=1)
    key_head_dim: int = Field(ge=1)
    value_head_dim: int = Field(ge=1)
    conv_width: int = Field(ge=1)

    @property
    def window(self) -> None:
        """The state sums up all tokens."""
        return

    @property
    def kv_values_per_token(self) -> int:
        """Tokens leave no entries of their own."""
        return 0

    def n_parameters(self, hidden_size: int) -> int:
        """Weights of the input, gate, convolution and output projections."""
        n_key, n_value = self.n_key_heads * self.key_head_dim, self.n_value_heads * self.value_head_dim
        inward = hidden_size * (2 * n_key + 2 * n_value + 2 * self.n_value_heads)
        return self.n_blocks * (inward + self.conv_width * (2 * n_key + n_value) + n_value * hidden_size)

    def kv_values_read(self, n_context_tokens: int) -> int:  # noqa: ARG002
        """Count the state, whatever the context."""
        return self.n_blocks * self.n_value_heads * self.key_head_dim * self.value_head_dim

    def kv_values_kept(self, n_context_tokens: int) -> int:
        """Count the state, whatever the context."""
        return self.kv_values_read(n_context_tokens)


class MambaMixer(_Block):
    """Selective state space layer (Jamba): a state of fixed size instead of a cache.

    Parameters with D the inner size: 2 H D in, conv D, D (rank + 2 s) + rank D + D s, D H out. The state
    has D s values, read once a step.
    """

    kind: Literal["mamba"] = "mamba"
    inner_size: int = Field(ge=1)
    state_size: int = Field(ge=1)
    conv_width: int = Field(ge=1)
    dt_rank: int = Field(ge=1)

    @property
    def window(self) -> None:
        """The state sums up all tokens."""
        return

    @property
    def kv_values_per_token(self) -> int:
        """Tokens leave no entries of their own."""
        return 0

    def n_parameters(self, hidden_size: int) -> int:
        """Weights of the input, convolution, selection and output projections."""
        selection = 2 * self.dt_rank + 3 * self.state_size
        return self.n_blocks * self.inner_size * (3 * hidden_size + self.conv_width + selection)

    def kv_values_read(self, n_context_tokens: int) -> int:  # noqa: ARG002
        """Count the state, whatever the context."""
        return self.n_blocks * self.inner_size * self.state_size

    def kv_values_kept(self, n_context_tokens: int) -> int:
        """Count the state, whatever the context."""
        return self.kv_values_read(n_context_tokens)


AttentionBlock = Annotated[
    GroupedQueryAttention | LatentAttention | CompressedAttention | LinearAttention | MambaMixer,
    Field(discriminator="kind"),
]


def _reach(n_tokens: int, limit: int | None) -> int:
    """Tokens that count, given a limit or none."""
    if n_tokens < 0:
        raise ConfigError(f"n_context_tokens is {n_tokens}, allowed: 0 and more")
    return n_tokens if limit is None else min(n_tokens, limit)
