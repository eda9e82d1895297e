//! The operations that the decoder is written in. A backend chooses the representation of activations,
//! weights and KV.
//!
//! Invariant: an operation computes each row on its own, in an order that does not depend on the other rows.
//! Operations write into buffers that the decoder keeps between steps.

pub mod candle;
pub mod cpu;

use std::ops::Range;

use super::tensor::{HostTensor, SharedBytes};
use llmctl_base::error::{LoadError, Result};
pub use llmctl_kernel::attention::{KeyBlocks, KvType, KvValues, PAGE_TOKENS, ScoreRule};
pub use llmctl_kernel::gemm::WeightedRows;
pub use llmctl_kernel::math::Activation;
pub use llmctl_kernel::texts::{Reach, TextHeads};

/// Index of a page in the storage of its group.
pub type PageId = u32;

/// Placeholder in a span for a page that no row of the step can see.
pub const NO_PAGE: PageId = PageId::MAX;

/// The shape of one layer's KV.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    pub num_kv_heads: usize,
    /// Width of a head's keys.
    pub head_dim: usize,
    pub values: KvValues,
}

impl KvShape {
    /// Returns the number of values of a head.
    pub fn value_dim(self) -> usize {
        self.values.dim(self.head_dim)
    }
}

/// Layout of the KV pages. Stores that are kept equally long form a group; a page holds the rows of [`PAGE_TOKENS`]
/// tokens, or one state, of all stores of one group.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KvLayout {
    pub stores: Vec<Store>,
    pub num_groups: usize,
}

/// One store of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Store {
    pub shape: StoreShape,
    pub group: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreShape {
    /// Keys and values of each token.
    Rows(KvShape),
    /// A recurrent state of this many values, f32 whatever the KV type.
    State(usize),
}

impl StoreShape {
    /// Returns the bytes of the store in a page.
    pub fn bytes(self, kv_type: KvType) -> usize {
        match self {
            StoreShape::Rows(KvShape { num_kv_heads, head_dim, values }) => {
                num_kv_heads * PAGE_TOKENS * values.bytes(kv_type, head_dim)
            }
            StoreShape::State(len) => len * size_of::<f32>(),
        }
    }
}

impl KvLayout {
    /// Returns the bytes of a page of `group`.
    pub fn page_bytes(&self, group: usize, kv_type: KvType) -> usize {
        let stores = self.stores.iter().filter(|store| store.group == group);
        stores.map(|store| store.shape.bytes(kv_type)).sum()
    }
}

/// One attention layer's part of a step; `V` is the backend's vector.
#[derive(Debug, Clone, Copy)]
pub struct AttentionSpec<'a, V> {
    /// Index into [`KvLayout::stores`].
    pub store: usize,
    pub num_heads: usize,
    pub rule: ScoreRule,
    /// Number of tokens that a row sees, including its own; `None` for all.
    pub window: Option<usize>,
    /// True if rows also see those of [`RowSpan::seen_besides`].
    pub is_two_way: bool,
    /// Learned scores, one per head, that take part in the softmax without a value (gpt-oss).
    pub sinks: Option<&'a V>,
    /// The positions that rows see; `None` if they see all. Where each head chooses, its choices are whole pages.
    pub selected: Option<&'a SelectedKeys>,
}

/// An indexer's part of a step.
#[derive(Debug, Clone, Copy)]
pub struct IndexerSpec {
    /// Index into [`KvLayout::stores`], of the indexer's keys.
    pub store: usize,
    /// Number of positions that a row sees at most, a multiple of a block's; at least 1.
    pub top_k: usize,
    pub blocks: KeyBlocks,
    /// True if each head chooses for one KV head, by its products alone.
    pub is_per_head: bool,
}

/// The positions that the rows of a step see by an indexer's choice.
#[derive(Debug, Clone)]
pub struct SelectedKeys {
    pub top_k: usize,
    pub blocks: KeyBlocks,
    /// Number of choices of a row: one, or one for each KV head.
    pub num_choices: usize,
    /// `[rows, choices, top_k]`, ascending in each choice; unused, or missing, for rows that see all.
    pub positions: Vec<u32>,
}

impl Default for SelectedKeys {
    fn default() -> Self {
        Self { top_k: 0, blocks: KeyBlocks::SINGLE, num_choices: 1, positions: Vec::new() }
    }
}

impl SelectedKeys {
    /// Returns the first position whose row does not see all positions up to its own.
    pub fn first_choosing(&self) -> usize {
        self.blocks.first_choosing(self.top_k)
    }

    /// Makes all rows see all positions, of which there are at most `top_k`.
    pub fn see_all(&mut self, top_k: usize) {
        self.top_k = top_k;
        self.positions.clear();
    }

    /// Returns the positions that a KV head's row at `position` sees; `None` for all up to its own.
    pub fn of_row(&self, row: usize, kv_head: usize, position: usize) -> Option<&[u32]> {
        let choice = row * self.num_choices + kv_head.min(self.num_choices - 1);
        let num_seen = || self.blocks.num_seen(self.top_k, position);
        (position >= self.first_choosing()).then(|| &self.positions[choice * self.top_k..][..num_seen()])
    }
}

/// A causal convolution over each channel separately; `V` is the backend's vector. Its state is the inputs of the
/// last `taps - 1` tokens, the oldest first, and zeros before the first token of a sequence.
#[derive(Debug, Clone, Copy)]
pub struct ConvSpec<'a, V> {
    /// Index into [`KvLayout::stores`].
    pub store: usize,
    /// `[taps, channels]`, the oldest tap first.
    pub kernel: &'a V,
    /// `[channels]`.
    pub bias: Option<&'a V>,
    /// True if SiLU is applied to the result.
    pub silu: bool,
}

/// The heads of a gated delta net. Each key head serves as many value heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaShape {
    pub key_heads: usize,
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    /// True if value heads cycle through the key heads (llama.cpp's form); else consecutive ones share a key
    /// head.
    pub tiled: bool,
}

impl DeltaShape {
    /// Returns the key head that a value head reads.
    pub fn key_head(self, value_head: usize) -> usize {
        if self.tiled {
            value_head % self.key_heads
        } else {
            value_head / (self.value_heads / self.key_heads)
        }
    }

    /// Returns the number of values of a row's queries, keys and values.
    pub fn conv_width(self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// Returns the number of values in all heads' states.
    pub fn state_len(self) -> usize {
        self.value_heads * self.key_dim * self.value_dim
    }
}

/// One gated delta net's part of a step; `V` is the backend's vector. Its state is `[value_heads, key_dim,
/// value_dim]`, zeros before the first token of a sequence.
#[derive(Debug, Clone, Copy)]
pub struct DeltaSpec<'a, V> {
    /// Index into [`KvLayout::stores`].
    pub store: usize,
    pub shape: DeltaShape,
    /// `[value_heads]`: at each token a state is multiplied by `exp(-fading * softplus(decay + decay_bias))`, or by
    /// `exp(bound * sigmoid(fading * (decay + decay_bias)))`.
    pub fading: &'a V,
    /// Below 0; `None` for the first form.
    pub decay_bound: Option<f32>,
    /// `[value_heads]`, or `[value_heads, key_dim]` if each key's values have a factor of their own.
    pub decay_bias: &'a V,
}

impl DeltaSpec<'_, Vec<f32>> {
    /// Returns the number of factors by which a head's state fades.
    pub fn num_decays(&self) -> usize {
        self.decay_bias.len() / self.shape.value_heads
    }
}

/// The heads of a Mamba-2 mixer. Consecutive heads share a group's key and query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SsmShape {
    pub heads: usize,
    pub head_dim: usize,
    pub groups: usize,
    /// Length of a key and of a query.
    pub state_dim: usize,
}

impl SsmShape {
    /// Returns the number of values of a row's heads.
    pub fn inner(self) -> usize {
        self.heads * self.head_dim
    }

    /// Returns the number of values of a row's heads, keys and queries.
    pub fn conv_width(self) -> usize {
        self.inner() + 2 * self.groups * self.state_dim
    }

    /// Returns the number of values in all heads' states.
    pub fn state_len(self) -> usize {
        self.inner() * self.state_dim
    }
}

/// One Mamba-2 mixer's part of a step; `V` is the backend's vector. Its state is `[heads, state_dim, head_dim]`, zeros
/// before the first token of a sequence.
#[derive(Debug, Clone, Copy)]
pub struct SsmSpec<'a, V> {
    /// Index into [`KvLayout::stores`].
    pub store: usize,
    pub shape: SsmShape,
    /// `[heads]`: at each token a state is multiplied by `exp(-fading * step)`, where `step` is `softplus(given step +
    /// step_bias)`, limited to `step_limits`. Without `step_bias` each step is 1, and the given ones are not read.
    pub fading: &'a V,
    pub step_bias: Option<&'a V>,
    /// In ascending order.
    pub step_limits: [f32; 2],
    /// `[heads]`: factors of a head's values in its output.
    pub skip: &'a V,
}

/// An update of a recurrent state, with its inputs.
pub enum Recurrence<'a, B: Backend + ?Sized> {
    /// The convolution of an input.
    Convolution(ConvSpec<'a, B::Vector>, &'a B::Buffer),
    /// The gated delta rule: `[qkv, rate, decay]` are [`DeltaShape::conv_width`], `value_heads` and `value_heads` wide, the result is
    /// `[rows, value_heads * value_dim]`. Queries and keys are normalised first; a sigmoid is applied to the rate.
    Delta(DeltaSpec<'a, B::Vector>, [&'a B::Buffer; 3]),
    /// The recurrence of Mamba-2: `[xbc, step]` are [`SsmShape::conv_width`] and `heads` wide, the result is `[rows, heads *
    /// head_dim]`.
    Ssm(SsmSpec<'a, B::Vector>, [&'a B::Buffer; 2]),
}

/// Consecutive rows of a step that belong to one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowSpan {
    /// Rows of the step.
    pub rows: Range<usize>,
    /// Position of the first row; the others follow without gaps.
    pub start: usize,
    /// Number of drafted rows, which are the last. A step leaves recurrent states before them; see
    /// [`Backend::keep_drafted`].
    pub num_drafted: usize,
    /// The sequence's pages in this group, in token order, with [`NO_PAGE`] for those out of sight. In a recurrent
    /// group the single page.
    pub pages: Vec<PageId>,
    /// For each row, positions that it sees besides its own and earlier ones where the rows of an image see each other; empty if
    /// none does. See [`llmctl_kernel::attention::visible`].
    pub seen_besides: Vec<Range<usize>>,
}

impl RowSpan {
    /// Returns what the row at a position sees besides its own and earlier ones.
    pub fn seen_besides(&self, position: usize) -> Option<&Range<usize>> {
        self.seen_besides.get(position - self.start)
    }

    /// Returns the first row that has more than `most` positions up to its own; so have those after it.
    pub fn first_beyond(&self, most: usize) -> usize {
        self.rows.end.min(self.rows.start.saturating_add(most.saturating_sub(self.start)))
    }

    /// Returns the page of a position and the offset within it.
    pub fn slot(&self, position: usize) -> (PageId, usize) {
        (self.pages[position / PAGE_TOKENS], position % PAGE_TOKENS)
    }
}

/// One of several products of the same input: `out = x . weight^T + bias`, and what changes its rows.
pub struct Product<'a, B: Backend + ?Sized> {
    pub weight: &'a B::Weight,
    pub bias: Option<&'a B::Vector>,
    pub changes: Vec<LowRankChange<'a, B>>,
    pub out: &'a mut B::Buffer,
}

impl<'a, B: Backend + ?Sized> Product<'a, B> {
    pub fn new(weight: &'a B::Weight, bias: Option<&'a B::Vector>, out: &'a mut B::Buffer) -> Self {
        Self { weight, bias, changes: Vec::new(), out }
    }
}

/// A change of a product's result: `out[rows[i]] += weights[i] * factor * (x[rows[i]] . down^T) . up^T`; rows ascend.
pub struct LowRankChange<'a, B: Backend + ?Sized> {
    pub matrices: &'a B::LowRank,
    pub to: WeightedRows<'a>,
}

/// A gated feed-forward network, `down(activation(gate(x)) * up(x))`, with memory for the results of its products.
pub struct GatedNetwork<'a, B: Backend + ?Sized> {
    pub activation: Activation,
    /// Gate and up.
    pub inner: [Product<'a, B>; 2],
    pub down: Product<'a, B>,
}

impl<B: Backend + ?Sized> GatedNetwork<'_, B> {
    /// Returns whether something changes one of the products.
    pub fn is_changed(&self) -> bool {
        self.inner.iter().chain([&self.down]).any(|product| !product.changes.is_empty())
    }
}

/// Computes [`Backend::feed_forward`] by its separate operations.
pub fn feed_forward_in_steps<B: Backend + ?Sized>(
    backend: &B,
    x: &B::Buffer,
    GatedNetwork { activation, mut inner, down }: GatedNetwork<'_, B>,
) -> Result<()> {
    backend.matmul_each(x, &mut inner)?;
    let [gate, up] = inner;
    backend.gated(activation, gate.out, up.out)?;
    backend.matmul_each(gate.out, &mut [down])
}

/// Computes [`Backend::add_feed_forward`] by its separate operations.
pub fn add_feed_forward_in_steps<B: Backend + ?Sized>(
    backend: &B,
    x: &B::Buffer,
    to: WeightedRows<'_>,
    network: GatedNetwork<'_, B>,
    [selected, out]: [&mut B::Buffer; 2],
) -> Result<()> {
    let GatedNetwork { activation, inner, down: Product { weight, bias, changes, out: result } } = network;
    let down = Product { weight, bias, changes, out: &mut *result };
    backend.select_rows(x, to.rows, selected)?;
    backend.feed_forward(selected, GatedNetwork { activation, inner, down })?;
    backend.add_rows(out, result, to.rows, to.weights)
}

/// Operations on `[rows, width]` activations.
pub trait Backend: Send + 'static {
    /// Activations, `[rows, width]`, f32.
    type Buffer: Default + Send;
    /// A matrix `[out, in]` in its stored type.
    type Weight: Send + Sync;
    /// The matrices of an operation's heads, `[out, in]` each.
    type HeadWeights: Send + Sync;
    /// Two matrices of floats, `down` `[rank, in]` and `up` `[out, rank]`, and the factor of their product.
    type LowRank: Send + Sync;
    /// A vector in f32.
    type Vector: Send;
    /// Cosines and sines of one step's positions, `[rows, dim / 2]` each.
    type Angles: Default + Send;
    /// Pages of keys and values of all layers.
    type Kv: Send;

    fn weight(&self, tensor: &HostTensor) -> Result<Self::Weight, LoadError>;

    /// Uploads a matrix of an expert, which many tokens do not use, so it may take its final form when it is first used.
    fn expert(&self, tensor: &HostTensor) -> Result<Self::Weight, LoadError> {
        self.weight(tensor)
    }

    /// Uploads a matrix that is only used to look up rows, so it may stay in the file's layout.
    fn table(&self, tensor: &HostTensor) -> Result<Self::Weight, LoadError> {
        self.weight(tensor)
    }

    /// Makes one of the matrices that [`Self::matmul_heads`] takes together, all of one shape.
    fn head_weights(&self, weights: Vec<Self::Weight>) -> Result<Self::HeadWeights, LoadError>;

    fn low_rank(&self, down_up: [&HostTensor; 2], factor: f32) -> Result<Self::LowRank, LoadError>;

    fn vector(&self, values: Vec<f32>) -> Result<Self::Vector, LoadError>;

    /// Creates storage without pages. Returns an error for a KV type that the backend does not support.
    fn kv(&self, layout: &KvLayout, kv_type: KvType) -> Result<Self::Kv, LoadError>;

    fn buffer(&self) -> Self::Buffer;

    /// Computes `out[i] = scale * table[tokens[i]]`.
    fn embed(&self, table: &Self::Weight, tokens: &[u32], scale: f32, out: &mut Self::Buffer) -> Result<()>;

    /// Normalises each run of `weight.len()` values by its root mean square, then multiplies by `weight`.
    fn rms_norm(
        &self,
        x: &Self::Buffer,
        weight: &Self::Vector,
        eps: f32,
        out: &mut Self::Buffer,
    ) -> Result<()>;

    /// Subtracts each row's mean and divides by its standard deviation, then multiplies by `weight` and adds `bias`.
    fn layer_norm(
        &self,
        x: &Self::Buffer,
        weight_bias: [&Self::Vector; 2],
        eps: f32,
        out: &mut Self::Buffer,
    ) -> Result<()>;

    /// Computes `out = attention(q)` within each text of the step, whose rows are given in ascending order: `[q, k, v]` are
    /// `[rows, num_heads * head_dim]` and twice `[rows, num_kv_heads * head_dim]`. Nothing is kept.
    fn attend_texts(
        &self,
        heads: &TextHeads,
        qkv: [&Self::Buffer; 3],
        texts: &[Range<usize>],
        out: &mut Self::Buffer,
    ) -> Result<()>;

    /// Normalises each of `groups` equal runs of a row by its root mean square, then multiplies the row by `weight`.
    fn rms_norm_groups(
        &self,
        x: &Self::Buffer,
        weight: &Self::Vector,
        groups: usize,
        eps: f32,
        out: &mut Self::Buffer,
    ) -> Result<()>;

    /// Normalises as `rms_norm`, for rows that are inputs of products; a backend may prepare them.
    fn rms_norm_into_products(
        &self,
        x: &Self::Buffer,
        weight: &Self::Vector,
        eps: f32,
        out: &mut Self::Buffer,
    ) -> Result<()> {
        self.rms_norm(x, weight, eps, out)
    }

    /// Computes `out = x . weight^T + bias`.
    fn matmul(
        &self,
        x: &Self::Buffer,
        weight: &Self::Weight,
        bias: Option<&Self::Vector>,
        out: &mut Self::Buffer,
    ) -> Result<()> {
        self.matmul_each(x, &mut [Product::new(weight, bias, out)])
    }

    /// Computes several products of the same input, which is prepared once.
    fn matmul_each(&self, x: &Self::Buffer, products: &mut [Product<'_, Self>]) -> Result<()>;

    /// Computes a gated feed-forward network: `down(act(gate(x)) * up(x))`. Overwrites the buffers of `gate` and
    /// `up`.
    fn feed_forward(&self, x: &Self::Buffer, network: GatedNetwork<'_, Self>) -> Result<()> {
        feed_forward_in_steps(self, x, network)
    }

    /// Adds an expert's part: `out[rows[i]] += weights[i] * network(x[rows[i]])`; the rows must be distinct. `selected` and the
    /// network's own memory are overwritten, and may hold anything afterwards.
    fn add_feed_forward(
        &self,
        x: &Self::Buffer,
        to: WeightedRows<'_>,
        network: GatedNetwork<'_, Self>,
        [selected, out]: [&mut Self::Buffer; 2],
    ) -> Result<()> {
        add_feed_forward_in_steps(self, x, to, network, [selected, out])
    }

    /// Computes a product of each head's part of the input with a matrix of its own: `x` is `[rows, heads * in]`, the
    /// weights `[out, in]` by head, `out` is `[rows, heads * out]`.
    fn matmul_heads(
        &self,
        x: &Self::Buffer,
        weights: &Self::HeadWeights,
        out: &mut Self::Buffer,
    ) -> Result<()>;

    /// Joins the parts of each of `num_heads` heads, in their order.
    fn join_heads(&self, parts: &[&Self::Buffer], num_heads: usize, out: &mut Self::Buffer) -> Result<()>;

    /// Computes `out[group] = sigmoid(r(x . y / sqrt(len)))` for each of `groups` equal runs of `len` values of both rows, where `r(g)
    /// = sign(g) * sqrt(max(|g|, 1e-6))`, and 0 for 0.
    fn gate_groups(&self, xy: [&Self::Buffer; 2], groups: usize, out: &mut Self::Buffer) -> Result<()>;

    /// Uploads the angles of a step: `cos` and `sin` are `[rows, dim / 2]`.
    fn angles(&self, cos: &[f32], sin: &[f32], rows: usize, out: &mut Self::Angles) -> Result<()>;

    /// Rotates the first `dim` values of every head of `head_dim` values, pairing i with i + dim / 2.
    fn rope(&self, x: &mut Self::Buffer, head_dim: usize, angles: &Self::Angles) -> Result<()>;

    /// Computes `out = rope(rms_norm(x))`, as [`Backend::rms_norm`] with `norm`'s weight and epsilon and [`Backend::rope`] do.
    fn norm_rope(
        &self,
        x: &Self::Buffer,
        (weight, eps): (&Self::Vector, f32),
        head_dim: usize,
        angles: &Self::Angles,
        out: &mut Self::Buffer,
    ) -> Result<()> {
        self.rms_norm(x, weight, eps, out)?;
        self.rope(out, head_dim, angles)
    }

    /// Writes `k` and `v`, `[rows, num_kv_heads * head_dim]`, to the pages of the store's group. A store whose keys hold
    /// the values does not read `v`.
    fn store_kv(
        &self,
        kv: &mut Self::Kv,
        store: usize,
        k: &Self::Buffer,
        v: &Self::Buffer,
        spans: &[RowSpan],
    ) -> Result<()>;

    /// Copies a page of `group`.
    fn copy_page(&self, kv: &mut Self::Kv, group: usize, from: PageId, to: PageId) -> Result<()>;

    /// Returns a page's memory to the system if possible; its content is lost.
    fn free_page(&self, kv: &mut Self::Kv, group: usize, page: PageId);

    /// Makes memory ready for a page to come, unless `most` bytes or as many as are worth it are. Returns whether it did.
    fn prepare_page(&self, _kv: &mut Self::Kv, _most: usize) -> bool {
        false
    }

    /// Appends a page's content to `out`, [`KvLayout::page_bytes`] bytes in the backend's own order.
    fn export_page(&self, kv: &Self::Kv, group: usize, page: PageId, out: &mut Vec<u8>) -> Result<()>;

    /// Replaces a page's content by the bytes that `export_page` wrote, which the page may keep and read where they are.
    /// Returns an error for any other number of bytes.
    fn import_page(&self, kv: &mut Self::Kv, group: usize, page: PageId, bytes: SharedBytes) -> Result<()>;

    /// Lets the states in a page of a recurrent group take in the first `count` drafted rows of the last step. Returns an
    /// error if fewer were drafted.
    fn keep_drafted(&self, kv: &mut Self::Kv, group: usize, page: PageId, count: usize) -> Result<()>;

    /// Computes `out = attention(q)` over the pages, causally: a row sees its own and earlier positions. `q` is `[rows,
    /// num_heads * head_dim]`, `out` is `[rows, num_heads * value_dim]`.
    fn attend(
        &self,
        kv: &Self::Kv,
        spec: &AttentionSpec<'_, Self::Vector>,
        q: &Self::Buffer,
        spans: &[RowSpan],
        out: &mut Self::Buffer,
    ) -> Result<()>;

    /// Chooses for each row the positions with the highest scores of an indexer, whose keys are in the pages: `[q, weights]` are
    /// `[rows, heads * head_dim]` and `[rows, heads]`; where each head chooses, `weights` are not read. See
    /// [`llmctl_kernel::attention::index_page`] and [`KeyBlocks::choose`] for score and choice.
    fn select_keys(
        &self,
        kv: &Self::Kv,
        spec: &IndexerSpec,
        inputs: [&Self::Buffer; 2],
        spans: &[RowSpan],
        out: &mut SelectedKeys,
    ) -> Result<()>;

    /// Computes a recurrence over the rows into `out`, and updates the states of the sequences.
    fn recur(
        &self,
        kv: &mut Self::Kv,
        recurrence: &Recurrence<'_, Self>,
        spans: &[RowSpan],
        out: &mut Self::Buffer,
    ) -> Result<()>;

    /// Computes `gate = activation(gate) * up`.
    fn gated(&self, activation: Activation, gate: &mut Self::Buffer, up: &Self::Buffer) -> Result<()>;

    /// Computes `x = activation(x)`.
    fn activate(&self, activation: Activation, x: &mut Self::Buffer) -> Result<()>;

    /// Computes `x += scale * y`.
    fn add_scaled(&self, x: &mut Self::Buffer, y: &Self::Buffer, scale: f32) -> Result<()>;

    /// Computes `x *= scale`.
    fn scale(&self, x: &mut Self::Buffer, scale: f32) -> Result<()>;

    /// Computes `x[i] *= factors[i]` for each row.
    fn scale_rows(&self, x: &mut Self::Buffer, factors: &[f32]) -> Result<()>;

    /// Multiplies each head of each row of `x` by the row's factor for it; `factors` is `[rows, heads]`.
    fn scale_heads(&self, x: &mut Self::Buffer, factors: &Self::Buffer) -> Result<()>;

    /// Multiplies each row of `x` by `vector`, value by value.
    fn multiply(&self, x: &mut Self::Buffer, vector: &Self::Vector) -> Result<()>;

    /// Scales each row of `x` to the root mean square of the same row of `reference`. A mean square of `x` below `least`
    /// counts as `least`.
    fn match_magnitude(&self, x: &mut Self::Buffer, reference: &Self::Buffer, least: f32) -> Result<()>;

    /// Computes `x = max(x - cutoff, 0)`, where a row's cutoff lies `deviations` standard deviations above its mean.
    fn cut_off(&self, x: &mut Self::Buffer, deviations: f32) -> Result<()>;

    /// Computes `out = x[.., columns]`.
    fn select_columns(&self, x: &Self::Buffer, columns: Range<usize>, out: &mut Self::Buffer) -> Result<()>;

    /// Computes `out[i] = x[rows[i]]`.
    fn select_rows(&self, x: &Self::Buffer, rows: &[usize], out: &mut Self::Buffer) -> Result<()>;

    /// Sets `out` to zeros, `[rows, width]`.
    fn zeros(&self, rows: usize, width: usize, out: &mut Self::Buffer) -> Result<()>;

    /// Computes `x[rows[i]] += weights[i] * y[i]`; the rows must be distinct.
    fn add_rows(&self, x: &mut Self::Buffer, y: &Self::Buffer, rows: &[usize], weights: &[f32])
    -> Result<()>;

    /// Moves activations to the host, row-major. Replaces the content of `out`; `x` must be written before it is used
    /// again. A backend with activations on the host may swap the two, so passing the last call's `out` again avoids
    /// allocations.
    fn read(&self, x: &mut Self::Buffer, out: &mut Vec<f32>) -> Result<()>;

    /// Fills `out` with activations of the host, row-major, each row `width` wide.
    fn write(&self, values: &[f32], width: usize, out: &mut Self::Buffer) -> Result<()>;
}
