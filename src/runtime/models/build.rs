//! Compiles the CUDA kernels to PTX, for the feature `cuda`. PTX of the oldest GPU that nvcc 13 knows runs on every later one.

use std::path::{Path, PathBuf};
use std::process::Command;

const FOLDER: &str = "backend/candle/cuda";

/// Returns the compiler: of the toolkit that CUDA_HOME names, else the one in PATH.
fn nvcc() -> PathBuf {
    println!("cargo:rerun-if-env-changed=CUDA_HOME");
    std::env::var_os("CUDA_HOME").map_or("nvcc".into(), |home| Path::new(&home).join("bin/nvcc"))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed={FOLDER}");
    if std::env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return Ok(());
    }
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?);
    for name in ["attention", "norm_rope", "product"] {
        let mut nvcc = Command::new(nvcc());
        nvcc.args(["-ptx", "-O3", "-std=c++17", "-arch=compute_75", "-o"])
            .arg(out.join(name).with_extension("ptx"));
        let status = nvcc.arg(format!("{FOLDER}/{name}.cu")).status();
        let status = status.map_err(|error| format!("{}: {error}", nvcc.get_program().display()))?;
        if !status.success() {
            return Err(format!("nvcc cannot compile {name}.cu: {status}").into());
        }
    }
    Ok(())
}
