//! KV storage on the device: a tensor each for a layer's keys and values, `[kv_heads, slots, head_dim]`, where a slot is
//! `page * PAGE_TOKENS + offset`; one for both if the keys hold the values. A store of states is a tensor `[1, pages, len]`
//! in f32.
//!
//! Heads come first, so that a sequence in consecutive pages is read in place. Storage grows to the highest
//! page ever written and is zeroed, so that slots never written hold finite numbers.

use std::cell::{RefCell, RefMut};

use candle_core::{DType, Device, Result, Tensor};
use half::f16;

use super::heads::Drafted;
use super::step::StepIndex;
use super::{KvLayout, KvShape, KvType, RowSpan};
use crate::backend::{PAGE_TOKENS, PageId, Store, StoreShape};

/// Least growth of the storage, in pages.
const MIN_GROWTH: usize = 8;

/// Keys, values and states of all layers, and the indices of the present step.
#[derive(Debug)]
pub struct CandleKv {
    device: Device,
    layers: Vec<KvLayer>,
    /// Step indices by group: made for the first layer of a step and reused by the others. A cell, because reading KV
    /// also creates indices.
    steps: Vec<RefCell<StepIndex>>,
}

#[derive(Debug)]
struct KvLayer {
    shape: StoreShape,
    dtype: DType,
    group: usize,
    /// Keys and values, or those that the store has, or states; empty before the first write.
    stores: Vec<Tensor>,
    /// The inputs that the last step's drafted rows have for the states.
    drafted: Vec<Drafted>,
}

impl KvLayer {
    /// Returns heads and width of each tensor.
    fn parts(&self) -> Vec<[usize; 2]> {
        match self.shape {
            StoreShape::Rows(KvShape { num_kv_heads, head_dim, values }) => {
                let widths = [head_dim, values.row_dim(head_dim)];
                widths[..values.num_rows()].iter().map(|width| [num_kv_heads, *width]).collect()
            }
            StoreShape::State(len) => vec![[1, len]],
        }
    }

    /// Returns the slots of a page.
    fn page_slots(&self) -> usize {
        match self.shape {
            StoreShape::Rows(_) => PAGE_TOKENS,
            StoreShape::State(_) => 1,
        }
    }

    /// Makes room for slots below `num_slots`. Storage grows by at least a quarter, so that it seldom has to be
    /// copied.
    fn reserve(&mut self, num_slots: usize, device: &Device) -> Result<()> {
        let had = self.stores.first().map_or(Ok(0), |store| store.dim(1))?;
        if num_slots <= had {
            return Ok(());
        }
        let page_slots = self.page_slots();
        let grown = (had + had / 4).max(had + MIN_GROWTH * page_slots).max(num_slots);
        let slots = grown.next_multiple_of(page_slots);
        let zeros = |[heads, width]: [usize; 2]| Tensor::zeros((heads, slots, width), self.dtype, device);
        let grown = self.parts().into_iter().map(zeros).collect::<Result<Vec<_>>>()?;
        for (new, old) in grown.iter().zip(&self.stores) {
            new.slice_set(old, 1, 0)?;
        }
        self.stores = grown;
        Ok(())
    }
}

impl CandleKv {
    /// Creates storage of a type that candle has tensors of.
    ///
    /// # Errors
    /// Names block-quantised rows.
    pub fn new(device: &Device, layout: &KvLayout, kv_type: KvType) -> Result<Self> {
        let of_rows = match kv_type {
            KvType::F32 => DType::F32,
            KvType::F16 => DType::F16,
            _ => candle_core::bail!(
                "KV of type {} is for the CPU only; a GPU keeps f16 or f32",
                kv_type.name()
            ),
        };
        let layer = |store: &Store| KvLayer {
            shape: store.shape,
            dtype: if matches!(store.shape, StoreShape::Rows(_)) { of_rows } else { DType::F32 },
            group: store.group,
            stores: Vec::new(),
            drafted: Vec::new(),
        };
        let layers = layout.stores.iter().map(layer).collect();
        let steps = (0..layout.num_groups).map(|_| RefCell::default()).collect();
        Ok(Self { device: device.clone(), layers, steps })
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the shape of a store of rows.
    pub fn shape(&self, layer: usize) -> KvShape {
        match self.layers[layer].shape {
            StoreShape::Rows(shape) => shape,
            StoreShape::State(_) => unreachable!("store {layer} holds a state"),
        }
    }

    /// Returns keys and values of a layer, `[kv_heads, slots, width]` in the stored type; one tensor if the keys hold the
    /// values, or there are none.
    pub fn stores(&self, layer: usize) -> Result<&[Tensor]> {
        match self.layers[layer].stores.as_slice() {
            [] => candle_core::bail!("KV is read before it is written"),
            stores => Ok(stores),
        }
    }

    /// Returns the indices of the step with these `spans` of the layer's group.
    pub fn step(&self, layer: usize, spans: &[RowSpan]) -> RefMut<'_, StepIndex> {
        let mut step = self.steps[self.layers[layer].group].borrow_mut();
        step.turn_to(spans);
        step
    }

    /// Writes rows of keys, `[rows, kv_heads * head_dim]`, and of values, which may be narrower, to the slots of their
    /// spans. A store without rows of values leaves theirs out.
    pub fn write(&mut self, layer: usize, rows: [&Tensor; 2], spans: &[RowSpan]) -> Result<()> {
        for (part, ([heads, width], rows)) in self.layers[layer].parts().into_iter().zip(rows).enumerate() {
            let writes = self.step(layer, spans).writes(&self.device, [heads, width])?;
            self.reserve(layer, writes.num_slots)?;
            let by_head = rows.reshape(((), heads, width))?.transpose(0, 1)?;
            let by_head = by_head.to_dtype(self.layers[layer].dtype)?.contiguous()?;
            self.stores(layer)?[part].scatter_set(&writes.slots, &by_head, 1)?;
        }
        Ok(())
    }

    fn reserve(&mut self, layer: usize, num_slots: usize) -> Result<()> {
        self.layers[layer].reserve(num_slots, &self.device)
    }

    /// Returns the states of sequences, `[sequences, len]`, with zeros for those that a step begins.
    pub fn states(&mut self, layer: usize, spans: &[RowSpan]) -> Result<Tensor> {
        let last = spans.iter().map(|span| span.pages[0]).max().unwrap_or(0);
        self.reserve(layer, last as usize + 1)?;
        let [heads, len] = self.layers[layer].parts()[0];
        for span in spans.iter().filter(|span| span.start == 0) {
            let zeros = Tensor::zeros((heads, 1, len), DType::F32, &self.device)?;
            self.stores(layer)?[0].slice_set(&zeros, 1, span.pages[0] as usize)?;
        }
        match spans {
            [span] => self.state(layer, span.pages[0]),
            _ => self.stores(layer)?[0]
                .squeeze(0)?
                .index_select(&self.step(layer, spans).pages(&self.device)?, 0),
        }
    }

    /// Returns the state in a page, `[1, len]`.
    pub fn state(&self, layer: usize, page: PageId) -> Result<Tensor> {
        self.stores(layer)?[0].squeeze(0)?.narrow(0, page as usize, 1)
    }

    /// Replaces the states of sequences by `[sequences, len]`, in memory of their own.
    pub fn set_states(&self, layer: usize, spans: &[RowSpan], states: &Tensor) -> Result<()> {
        if let [span] = spans {
            return self.set_state(layer, span.pages[0], states);
        }
        let states = states.unsqueeze(0)?.contiguous()?;
        let places = self.step(layer, spans).pages(&self.device)?.reshape((1, spans.len(), 1))?;
        let places = places.broadcast_as(states.shape())?.contiguous()?;
        self.stores(layer)?[0].scatter_set(&places, &states, 1)
    }

    /// Replaces the state in a page by `[1, len]`, in memory of its own.
    pub fn set_state(&self, layer: usize, page: PageId, state: &Tensor) -> Result<()> {
        self.stores(layer)?[0].slice_set(&state.unsqueeze(0)?.contiguous()?, 1, page as usize)
    }

    /// Returns the inputs that the last step's drafted rows have for a store's states.
    pub fn drafted_mut(&mut self, layer: usize) -> &mut Vec<Drafted> {
        &mut self.layers[layer].drafted
    }

    pub fn layers_of(&self, group: usize) -> Vec<usize> {
        (0..self.layers.len()).filter(|&layer| self.layers[layer].group == group).collect()
    }

    /// Copies a page in every layer of its group.
    pub fn copy_page(&mut self, group: usize, from: PageId, to: PageId) -> Result<()> {
        for layer in self.layers_of(group) {
            let slots = self.layers[layer].page_slots();
            let [from, to] = [from, to].map(|page| page as usize * slots);
            self.reserve(layer, from.max(to) + slots)?;
            for store in self.stores(layer)? {
                // Copied first: candle cannot write a tensor while it is read.
                store.slice_set(&store.narrow(1, from, slots)?.force_contiguous()?, 1, to)?;
            }
        }
        Ok(())
    }

    /// Appends a page's content, keys before values, layer by layer, as little-endian numbers of the stored type.
    pub fn export_page(&self, group: usize, page: PageId, out: &mut Vec<u8>) -> Result<()> {
        for layer in self.layers_of(group) {
            let slots = self.layers[layer].page_slots();
            for store in self.stores(layer)? {
                let page = store.narrow(1, page as usize * slots, slots)?.flatten_all()?;
                match store.dtype() {
                    DType::F16 => {
                        out.extend(page.to_vec1::<f16>()?.iter().flat_map(|value| value.to_le_bytes()))
                    }
                    _ => out.extend(page.to_vec1::<f32>()?.iter().flat_map(|value| value.to_le_bytes())),
                }
            }
        }
        Ok(())
    }

    /// Fills a page with the bytes that `export_page` wrote.
    pub fn import_page(&mut self, group: usize, page: PageId, bytes: &[u8]) -> Result<()> {
        let layers = self.layers_of(group);
        let len = |layer: &KvLayer| {
            let widths = layer.parts().into_iter().map(|[heads, width]| heads * width).sum::<usize>();
            widths * layer.page_slots() * layer.dtype.size_in_bytes()
        };
        let total: usize = layers.iter().map(|layer| len(&self.layers[*layer])).sum();
        if total != bytes.len() {
            candle_core::bail!("a page of {total} bytes, not {}", bytes.len());
        }
        let mut rest = bytes;
        for layer in layers {
            let (slots, dtype) = (self.layers[layer].page_slots(), self.layers[layer].dtype);
            let start = page as usize * slots;
            self.reserve(layer, start + slots)?;
            for store in self.stores(layer)? {
                let shape = [store.dim(0)?, slots, store.dim(2)?];
                let (part, more) = rest.split_at(shape.iter().product::<usize>() * dtype.size_in_bytes());
                store.slice_set(&Tensor::from_raw_buffer(part, dtype, &shape, &self.device)?, 1, start)?;
                rest = more;
            }
        }
        Ok(())
    }
}
