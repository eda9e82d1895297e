//! Launches of the kernels, and the device that they run on. They run in its one stream, behind what fills their inputs.

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cuda_backend::cudarc::driver::{DevicePtr, DeviceRepr, LaunchConfig, PushKernelArg};
use candle_core::cuda_backend::{CudaDType, CudaDevice, WrapErr};
use candle_core::{CudaStorage, DType, Device, Layout, Result, Shape, Storage, Tensor, bail};
use half::f16;

use super::{FusedProduct, NormRope, PagedAttention, Widened};

const PRODUCT: [&str; 2] = ["product", include_str!(concat!(env!("OUT_DIR"), "/product.ptx"))];
const ATTENTION: [&str; 2] = ["attention", include_str!(concat!(env!("OUT_DIR"), "/attention.ptx"))];
const NORM_ROPE: [&str; 2] = ["norm_rope", include_str!(concat!(env!("OUT_DIR"), "/norm_rope.ptx"))];

/// Blocks of attention that keep the multiprocessors of a large GPU busy, and the fewest positions that are worth one.
const ENOUGH_BLOCKS: usize = 256;
const LEAST_PART: usize = 128;

/// Opens a GPU with one stream for all threads.
///
/// candle's `Device::new_cuda` takes CUDA's per-thread stream, which is another stream in each thread, and cudarc then lets none
/// wait for another: an engine's thread would read weights whose copies the loading thread has only begun (seen in the sources of
/// candle-core 0.11.1 and cudarc 0.19.10). In one stream, the order in which threads hand a model to each other is the order of
/// the work.
pub fn open(index: usize) -> Result<Device> {
    let device = CudaDevice::new_with_stream(index)?;
    // SAFETY: the events order several streams, and the device has one; `open_device` opens it once.
    unsafe { device.disable_event_tracking() };
    Ok(Device::Cuda(device))
}

/// Returns the bytes of a GPU's memory and how many of them are free, after what was freed has gone back to the driver.
pub fn memory(device: &CudaDevice) -> Result<[u64; 2]> {
    device.synchronize()?;
    let (free, total) = device.cuda_stream().context().mem_get_info().w()?;
    Ok([total as u64, free as u64])
}

/// Returns the address of the contiguous part of a storage that a layout describes.
fn address(storage: &CudaStorage, layout: &Layout) -> Result<u64> {
    let Some((start, _)) = layout.contiguous_offsets() else {
        bail!("a kernel on values that are not contiguous");
    };
    let stream = storage.device().cuda_stream();
    Ok(match storage.dtype() {
        DType::F16 => storage.as_cuda_slice::<f16>()?.slice(start..).device_ptr(&stream).0,
        DType::U32 => storage.as_cuda_slice::<u32>()?.slice(start..).device_ptr(&stream).0,
        _ => storage.as_cuda_slice::<f32>()?.slice(start..).device_ptr(&stream).0,
    })
}

fn address_of(tensor: &Tensor) -> Result<u64> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cuda(storage) => address(storage, layout),
        _ => bail!("a kernel on a tensor that is not on its device"),
    }
}

/// Arguments of a kernel, in this order.
struct Arguments<'a> {
    inputs: &'a [u64],
    counts: &'a [usize],
    factors: &'a [f32],
}

/// Launches a kernel that fills `len` values, whose address follows those of its inputs.
fn run<T: CudaDType + DeviceRepr>(
    device: &CudaDevice,
    ([module, ptx], name): ([&str; 2], &str),
    (grid, threads): ([usize; 3], usize),
    Arguments { inputs, counts, factors }: Arguments<'_>,
    len: usize,
) -> Result<CudaStorage> {
    let function = device.get_or_load_custom_func(name, module, ptx)?;
    let counts = counts.iter().map(|count| i32::try_from(*count).map_err(candle_core::Error::wrap));
    let counts = counts.collect::<Result<Vec<i32>>>()?;
    // SAFETY: each kernel writes all of its output.
    let out = unsafe { device.alloc::<T>(len)? };
    let [x, y, z] = grid.map(|blocks| blocks as u32); // the driver refuses grids beyond its limits
    let config = LaunchConfig { grid_dim: (x, y, z), block_dim: (threads as u32, 1, 1), shared_mem_bytes: 0 };
    let mut builder = function.builder();
    for address in inputs {
        builder.arg(address);
    }
    builder.arg(&out);
    for count in &counts {
        builder.arg(count);
    }
    for factor in factors {
        builder.arg(factor);
    }
    // SAFETY: the callers below name the arguments of the kernels in this folder, whose shapes the operations' `apply` checked;
    // the inputs live until the launch, and memory is freed in the order of the stream.
    unsafe { builder.launch(config) }.w()?;
    Ok(CudaStorage::wrap_cuda_slice(out, device.clone()))
}

pub fn product(
    op: &FusedProduct<'_>,
    storage: &CudaStorage,
    layout: &Layout,
) -> Result<(CudaStorage, Shape)> {
    let ((rows, cols), (given, _)) = (op.weight.shape().dims2()?, layout.shape().dims2()?);
    let variant = given.next_power_of_two();
    let name = format!("product_{}_{variant}", op.dtype.name());
    let per_block = 4 * if variant == 4 { 4 } else { 2 }; // warps, and OUT of product.cu
    let arguments = Arguments {
        inputs: &[op.weight.device_ptr()? as u64, address(storage, layout)?],
        counts: &[cols, rows, given],
        factors: &[],
    };
    let shape = ([rows.div_ceil(per_block), 1, 1], 128);
    let out = run::<f32>(storage.device(), (PRODUCT, &name), shape, arguments, given * rows)?;
    Ok((out, Shape::from((given, rows))))
}

pub fn widen(op: &Widened<'_>, storage: &CudaStorage) -> Result<(CudaStorage, Shape)> {
    let shape = op.shape()?;
    let pairs = shape.elem_count() / 32;
    let start = op.weight.device_ptr()? as u64 + op.bytes()?.start as u64;
    let arguments = Arguments { inputs: &[start], counts: &[pairs], factors: &[] };
    let (name, grid) = (format!("widen_{}", op.dtype.name()), ([pairs.div_ceil(128), 1, 1], 128));
    let out = run::<f16>(storage.device(), (PRODUCT, &name), grid, arguments, shape.elem_count())?;
    Ok((out, shape))
}

pub fn norm_rope(op: &NormRope<'_>, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
    let ((rows, width), half) = (layout.shape().dims2()?, op.angles[0].dim(1)?);
    let heads = width / op.head_dim;
    let [cosines, sines] = [address_of(&op.angles[0])?, address_of(&op.angles[1])?];
    let weight = op.norm.map_or(Ok(0), |(weight, _)| address_of(weight))?;
    let arguments = Arguments {
        inputs: &[address(storage, layout)?, weight, cosines, sines],
        counts: &[rows, heads, op.head_dim, half],
        factors: &[op.norm.map_or(0.0, |(_, eps)| eps)],
    };
    let shape = ([(rows * heads).div_ceil(4), 1, 1], 128);
    let out = run::<f32>(storage.device(), (NORM_ROPE, "norm_rope"), shape, arguments, rows * width)?;
    Ok((out, layout.shape().clone()))
}

pub fn attention(
    op: &PagedAttention<'_>,
    storage: &CudaStorage,
    layout: &Layout,
) -> Result<(CudaStorage, Shape)> {
    let PagedAttention { stores: [keys, values], table, num_heads, rule, sinks } = *op;
    let ((kv_heads, slots, head_dim), rows) = (keys.dims3()?, table.ranges.dim(0)?);
    let blocks = kv_heads * (num_heads / kv_heads).div_ceil(4); // HEADS of attention.cu
    let most_parts = table.longest.div_ceil(LEAST_PART).max(1);
    let num_parts = (ENOUGH_BLOCKS / (blocks * rows)).clamp(1, most_parts);
    let kind = if keys.dtype() == DType::F16 { "f16" } else { "f32" };
    let [keys, values] = [address_of(keys)?, address_of(values)?];
    let arguments = Arguments {
        inputs: &[
            address(storage, layout)?,
            keys,
            values,
            address_of(&table.pages)?,
            address_of(&table.ranges)?,
        ],
        counts: &[num_heads, kv_heads, slots, table.pages.dim(1)?, table.longest.div_ceil(num_parts)],
        factors: &[rule.scale, rule.softcap.unwrap_or(0.0)],
    };
    let (device, name) = (storage.device(), format!("attend_{kind}_{head_dim}"));
    let len = rows * num_heads * num_parts * (head_dim + 2);
    let parts = run::<f32>(device, (ATTENTION, &name), ([num_parts, blocks, rows], 128), arguments, len)?;
    let arguments = Arguments {
        inputs: &[address(&parts, &Layout::contiguous(len))?, sinks.map_or(Ok(0), address_of)?],
        counts: &[num_parts, head_dim],
        factors: &[],
    };
    let len = rows * num_heads * head_dim;
    let out = run::<f32>(device, (ATTENTION, "combine"), ([num_heads, rows, 1], head_dim), arguments, len)?;
    Ok((out, layout.shape().clone()))
}
