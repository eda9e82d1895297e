//! KV storage on the device: two tensors per layer, `[kv_heads, slots, head_dim]`, where a slot is
//! `page * PAGE_TOKENS + offset`.
//!
//! Heads come first, so that a sequence in consecutive pages is read in place. Storage grows to the highest
//! page ever written and is zeroed, so that slots never written hold finite numbers.

use std::cell::{RefCell, RefMut};

use candle_core::{DType, Device, Result, Tensor};
use half::f16;

use super::step::StepIndex;
use super::{KvLayout, KvShape, KvType, RowSpan};
use crate::backend::{KvValues, NO_LATENT, NO_STATES, PAGE_TOKENS, PageId, StoreShape};

/// Least growth of the storage, in pages.
const MIN_GROWTH: usize = 8;

/// Keys and values of all layers, and the indices of the present step.
#[derive(Debug)]
pub struct CandleKv {
    device: Device,
    dtype: DType,
    layers: Vec<KvLayer>,
    /// Step indices by group: made for the first layer of a step and reused by the others. A cell, because reading KV
    /// also creates indices.
    steps: Vec<RefCell<StepIndex>>,
}

#[derive(Debug)]
struct KvLayer {
    shape: KvShape,
    group: usize,
    /// Keys and values; `None` before the first write.
    stores: Option<[Tensor; 2]>,
}

impl CandleKv {
    /// Creates storage of a type that candle has tensors of.
    ///
    /// # Errors
    /// [`LoadError`] for block-quantised rows, for recurrent states, and for keys that hold the values.
    pub fn new(device: &Device, layout: &KvLayout, kv_type: KvType) -> Result<Self> {
        let dtype = match kv_type {
            KvType::F32 => DType::F32,
            KvType::F16 => DType::F16,
            KvType::Q8_0 => candle_core::bail!("KV of type q8_0 is for the CPU only; a GPU keeps f16 or f32"),
        };
        let mut layers = Vec::with_capacity(layout.stores.len());
        for store in &layout.stores {
            let StoreShape::Rows(shape) = store.shape else { candle_core::bail!("{NO_STATES}") };
            if shape.values != KvValues::Own {
                candle_core::bail!("{NO_LATENT}");
            }
            layers.push(KvLayer { shape, group: store.group, stores: None });
        }
        let steps = (0..layout.num_groups).map(|_| RefCell::default()).collect();
        Ok(Self { device: device.clone(), dtype, layers, steps })
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    pub fn shape(&self, layer: usize) -> KvShape {
        self.layers[layer].shape
    }

    /// Returns keys and values of a layer, `[kv_heads, slots, head_dim]` in the stored type.
    pub fn stores(&self, layer: usize) -> Result<&[Tensor; 2]> {
        let stores = self.layers[layer].stores.as_ref();
        stores.ok_or_else(|| candle_core::Error::msg("KV is read before it is written"))
    }

    /// Returns the indices of the step with these `spans` of the layer's group.
    pub fn step(&self, layer: usize, spans: &[RowSpan]) -> RefMut<'_, StepIndex> {
        let mut step = self.steps[self.layers[layer].group].borrow_mut();
        step.turn_to(spans);
        step
    }

    /// Writes rows of keys and values, `[rows, kv_heads * head_dim]`, to the slots of their spans.
    pub fn write(&mut self, layer: usize, rows: [&Tensor; 2], spans: &[RowSpan]) -> Result<()> {
        let KvShape { num_kv_heads, head_dim, .. } = self.shape(layer);
        let writes = self.step(layer, spans).writes(&self.device, [num_kv_heads, head_dim])?;
        self.reserve(layer, writes.num_slots)?;
        for (store, rows) in self.stores(layer)?.iter().zip(rows) {
            let by_head = rows.reshape(((), num_kv_heads, head_dim))?.transpose(0, 1)?;
            let by_head = by_head.to_dtype(self.dtype)?.contiguous()?;
            store.scatter_set(&writes.slots, &by_head, 1)?;
        }
        Ok(())
    }

    fn layers_of(&self, group: usize) -> Vec<usize> {
        (0..self.layers.len()).filter(|&layer| self.layers[layer].group == group).collect()
    }

    /// Copies a page's keys and values in every layer of its group.
    pub fn copy_page(&mut self, group: usize, from: PageId, to: PageId) -> Result<()> {
        let [from, to] = [from, to].map(|page| page as usize * PAGE_TOKENS);
        for layer in self.layers_of(group) {
            self.reserve(layer, from.max(to) + PAGE_TOKENS)?;
            for store in self.stores(layer)? {
                // Copied first: candle cannot write a tensor while it is read.
                store.slice_set(&store.narrow(1, from, PAGE_TOKENS)?.force_contiguous()?, 1, to)?;
            }
        }
        Ok(())
    }

    /// Appends a page's content, keys before values, layer by layer, as little-endian numbers of the stored type.
    pub fn export_page(&self, group: usize, page: PageId, out: &mut Vec<u8>) -> Result<()> {
        for layer in self.layers_of(group) {
            for store in self.stores(layer)? {
                let page = store.narrow(1, page as usize * PAGE_TOKENS, PAGE_TOKENS)?.flatten_all()?;
                match self.dtype {
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
        let len = |layer: &usize| {
            let KvShape { num_kv_heads, head_dim, .. } = self.shape(*layer);
            num_kv_heads * PAGE_TOKENS * head_dim * self.dtype.size_in_bytes()
        };
        let lens: Vec<usize> = layers.iter().map(len).collect();
        let total = 2 * lens.iter().sum::<usize>();
        if total != bytes.len() {
            candle_core::bail!("a page of {total} bytes, not {}", bytes.len());
        }
        let (start, mut rest) = (page as usize * PAGE_TOKENS, bytes);
        for (layer, len) in layers.into_iter().zip(lens) {
            self.reserve(layer, start + PAGE_TOKENS)?;
            let KvShape { num_kv_heads, head_dim, .. } = self.shape(layer);
            for store in self.stores(layer)? {
                let (part, more) = rest.split_at(len);
                let shape = [num_kv_heads, PAGE_TOKENS, head_dim];
                store.slice_set(
                    &Tensor::from_raw_buffer(part, self.dtype, &shape, &self.device)?,
                    1,
                    start,
                )?;
                rest = more;
            }
        }
        Ok(())
    }

    /// Makes room for slots below `num_slots`. Storage grows by at least a quarter, so that it seldom has to be
    /// copied.
    fn reserve(&mut self, layer: usize, num_slots: usize) -> Result<()> {
        let KvLayer { shape, stores, .. } = &mut self.layers[layer];
        let had = match stores {
            Some([keys, _]) => keys.dim(1)?,
            None => 0,
        };
        if num_slots <= had {
            return Ok(());
        }
        let grown = (had + had / 4).max(had + MIN_GROWTH * PAGE_TOKENS).max(num_slots);
        let slots = grown.next_multiple_of(PAGE_TOKENS);
        let zeros = || Tensor::zeros((shape.num_kv_heads, slots, shape.head_dim), self.dtype, &self.device);
        let grown = [zeros()?, zeros()?];
        if let Some(stores) = stores {
            for (new, old) in grown.iter().zip(stores.iter()) {
                new.slice_set(old, 1, 0)?;
            }
        }
        *stores = Some(grown);
        Ok(())
    }
}
