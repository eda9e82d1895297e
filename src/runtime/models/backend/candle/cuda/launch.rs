//! Launches of the kernels. They run in the device's stream, behind what fills their inputs.

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaView, DeviceRepr, LaunchConfig, PushKernelArg};
use candle_core::cuda_backend::{CudaDType, CudaDevice, CudaFunc, WrapErr};
use candle_core::{CudaStorage, DType, Layout, Result, Shape, Storage, Tensor, bail};
use half::f16;

use super::{FusedProduct, NormRope, PagedAttention};

const PRODUCT: &str = include_str!(concat!(env!("OUT_DIR"), "/product.ptx"));
const ATTENTION: &str = include_str!(concat!(env!("OUT_DIR"), "/attention.ptx"));
const NORM_ROPE: &str = include_str!(concat!(env!("OUT_DIR"), "/norm_rope.ptx"));

/// Blocks of attention that keep the multiprocessors of a large GPU busy, and the fewest positions that are worth one.
const ENOUGH_BLOCKS: usize = 256;
const LEAST_PART: usize = 128;

/// Threads of a block of every kernel but `combine`.
const THREADS: u32 = 128;

fn config(grid: (usize, usize, usize), threads: u32) -> LaunchConfig {
    let grid_dim = (grid.0 as u32, grid.1 as u32, grid.2 as u32); // the driver refuses grids beyond its limits
    LaunchConfig { grid_dim, block_dim: (threads, 1, 1), shared_mem_bytes: 0 }
}

fn int(number: usize) -> Result<i32> {
    i32::try_from(number).map_err(candle_core::Error::wrap)
}

/// Returns the contiguous part of a storage that a layout describes.
fn part<'a, T: CudaDType + DeviceRepr>(storage: &'a CudaStorage, layout: &Layout) -> Result<CudaView<'a, T>> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(storage.as_cuda_slice::<T>()?.slice(start..end)),
        None => bail!("a kernel on values that are not contiguous"),
    }
}

/// Calls `with` with the values of a tensor that lies on the device.
fn read<T: CudaDType + DeviceRepr, O>(
    tensor: &Tensor,
    with: impl FnOnce(CudaView<'_, T>) -> Result<O>,
) -> Result<O> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cuda(storage) => with(part::<T>(storage, layout)?),
        _ => bail!("a kernel on a tensor that is not on its device"),
    }
}

pub fn product(
    op: &FusedProduct<'_>,
    storage: &CudaStorage,
    layout: &Layout,
) -> Result<(CudaStorage, Shape)> {
    let device = storage.device();
    let ((rows, cols), (given, _)) = (op.weight.shape().dims2()?, layout.shape().dims2()?);
    let variant = given.next_power_of_two();
    let function =
        device.get_or_load_custom_func(&format!("product_{}_{variant}", op.kernel), "product", PRODUCT)?;
    let x = part::<f32>(storage, layout)?;
    let stream = device.cuda_stream();
    let (weight, _guard) = op.weight.device_ptr_with_guard(&stream)?;
    let weight = weight as u64;
    // SAFETY: the kernel writes all of it.
    let out = unsafe { device.alloc::<f32>(given * rows)? };
    let (cols, rows_of_matrix, num_given) = (int(cols)?, int(rows)?, int(given)?);
    let per_block = 4 * if variant < 4 { 2 } else { 4 }; // warps, and OUT of product.cu
    let mut builder = function.builder();
    builder.arg(&weight).arg(&x).arg(&out).arg(&cols).arg(&rows_of_matrix).arg(&num_given);
    // SAFETY: the arguments are those of product.cu; `FusedProduct` checked that widths agree, and a matrix has rows * cols
    // values by construction of its tensor.
    unsafe { builder.launch(config((rows.div_ceil(per_block), 1, 1), THREADS)) }.w()?;
    Ok((CudaStorage::wrap_cuda_slice(out, device.clone()), Shape::from((given, rows))))
}

pub fn norm_rope(op: &NormRope<'_>, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
    let device = storage.device();
    let ((rows, width), half) = (layout.shape().dims2()?, op.angles[0].dim(1)?);
    let heads = width / op.head_dim;
    let x = part::<f32>(storage, layout)?;
    // SAFETY: the kernel writes all of it.
    let out = unsafe { device.alloc::<f32>(rows * width)? };
    let function = device.get_or_load_custom_func("norm_rope", "norm_rope", NORM_ROPE)?;
    let (num_rows, num_heads, head_dim, half) = (int(rows)?, int(heads)?, int(op.head_dim)?, int(half)?);
    let (eps, has_norm) = (op.norm.map_or(0.0, |(_, eps)| eps), i32::from(op.norm.is_some()));
    // Without a norm any tensor stands for the weight, which is not read.
    let weight = op.norm.map_or(&op.angles[0], |(weight, _)| weight);
    read::<f32, _>(weight, |weight| {
        read::<f32, _>(&op.angles[0], |cosines| {
            read::<f32, _>(&op.angles[1], |sines| {
                let mut builder = function.builder();
                builder.arg(&x).arg(&weight).arg(&cosines).arg(&sines).arg(&out);
                builder.arg(&num_rows).arg(&num_heads).arg(&head_dim).arg(&half).arg(&eps).arg(&has_norm);
                let heads_per_block = THREADS as usize / 32;
                // SAFETY: the arguments are those of norm_rope.cu, in the shapes that `NormRope::apply` checked.
                unsafe { builder.launch(config(((rows * heads).div_ceil(heads_per_block), 1, 1), THREADS)) }
                    .w()
            })
        })
    })?;
    Ok((CudaStorage::wrap_cuda_slice(out, device.clone()), layout.shape().clone()))
}

pub fn attention(
    op: &PagedAttention<'_>,
    storage: &CudaStorage,
    layout: &Layout,
) -> Result<(CudaStorage, Shape)> {
    let device = storage.device();
    let (kv_heads, _, head_dim) = op.stores[0].dims3()?;
    let rows = op.table.ranges.dim(0)?;
    let sets = (op.num_heads / kv_heads).div_ceil(4); // HEADS of attention.cu
    let most_parts = op.table.longest.div_ceil(LEAST_PART).max(1);
    let num_parts = (ENOUGH_BLOCKS / (kv_heads * sets * rows)).clamp(1, most_parts);
    let kind = if op.stores[0].dtype() == DType::F16 { "f16" } else { "f32" };
    let name = format!("attend_{kind}_{head_dim}");
    let function = device.get_or_load_custom_func(&name, "attention", ATTENTION)?;
    let q = part::<f32>(storage, layout)?;
    // SAFETY: the first kernel writes all of it.
    let parts = unsafe { device.alloc::<f32>(rows * op.num_heads * num_parts * (head_dim + 2))? };
    let launch = Launch { op, function, q, parts: parts.as_view(), grid: (num_parts, kv_heads * sets, rows) };
    match kind {
        "f16" => launch.run::<f16>()?,
        _ => launch.run::<f32>()?,
    }
    let out = combine(op, device, parts.as_view(), [rows, num_parts, head_dim])?;
    Ok((out, layout.shape().clone()))
}

/// The first pass of attention.
struct Launch<'a> {
    op: &'a PagedAttention<'a>,
    function: CudaFunc,
    q: CudaView<'a, f32>,
    parts: CudaView<'a, f32>,
    grid: (usize, usize, usize),
}

impl Launch<'_> {
    fn run<T: CudaDType + DeviceRepr>(&self) -> Result<()> {
        let PagedAttention { stores: [keys, values], table, num_heads, rule, .. } = *self.op;
        let (kv_heads, slots, _) = keys.dims3()?;
        let (num_heads, kv_heads, slots) = (int(num_heads)?, int(kv_heads)?, int(slots)?);
        let (max_pages, part_len) = (int(table.pages.dim(1)?)?, int(table.longest.div_ceil(self.grid.0))?);
        let (scale, softcap) = (rule.scale, rule.softcap.unwrap_or(0.0));
        read::<T, _>(keys, |keys| {
            read::<T, _>(values, |values| {
                read::<u32, _>(&table.pages, |pages| {
                    read::<u32, _>(&table.ranges, |ranges| {
                        let mut builder = self.function.builder();
                        builder
                            .arg(&self.q)
                            .arg(&keys)
                            .arg(&values)
                            .arg(&pages)
                            .arg(&ranges)
                            .arg(&self.parts);
                        builder.arg(&num_heads).arg(&kv_heads).arg(&slots).arg(&max_pages).arg(&part_len);
                        builder.arg(&scale).arg(&softcap);
                        // SAFETY: the arguments are those of attention.cu, in the shapes that `PagedAttention::apply` checked;
                        // pages of visible positions were written, so their slots are in the stores.
                        unsafe { builder.launch(config(self.grid, THREADS)) }.w()
                    })
                })
            })
        })?;
        Ok(())
    }
}

/// Launches the second pass of attention.
fn combine(
    op: &PagedAttention<'_>,
    device: &CudaDevice,
    parts: CudaView<'_, f32>,
    [rows, num_parts, head_dim]: [usize; 3],
) -> Result<CudaStorage> {
    // SAFETY: the kernel writes all of it.
    let out = unsafe { device.alloc::<f32>(rows * op.num_heads * head_dim)? };
    let function = device.get_or_load_custom_func("combine", "attention", ATTENTION)?;
    let (num_parts, dim, has_sinks) = (int(num_parts)?, int(head_dim)?, i32::from(op.sinks.is_some()));
    let mut run = |sinks: CudaView<'_, f32>| {
        let mut builder = function.builder();
        builder.arg(&parts).arg(&sinks).arg(&out).arg(&num_parts).arg(&dim).arg(&has_sinks);
        // SAFETY: the arguments are those of attention.cu; without sinks the pointer is not read.
        unsafe { builder.launch(config((op.num_heads, rows, 1), head_dim as u32)) }.w().map(|_| ())
    };
    match op.sinks {
        Some(sinks) => read::<f32, _>(sinks, &mut run)?,
        None => run(parts.as_view())?,
    }
    Ok(CudaStorage::wrap_cuda_slice(out, device.clone()))
}
