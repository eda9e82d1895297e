//! Compiles the CUDA kernels to PTX, for the feature `cuda`. PTX of the oldest GPU that nvcc 13 knows runs on every later one.

use std::path::Path;
use std::process::Command;

const FOLDER: &str = "backend/candle/cuda";

fn main() {
    println!("cargo:rerun-if-changed={FOLDER}");
    println!("cargo:rerun-if-env-changed=CUDA_HOME");
    if std::env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    let out = std::env::var_os("OUT_DIR").expect("cargo sets it");
    let nvcc = std::env::var_os("CUDA_HOME").map_or("nvcc".into(), |home| Path::new(&home).join("bin/nvcc"));
    for name in ["attention", "norm_rope", "product"] {
        let mut command = Command::new(&nvcc);
        command.args(["-ptx", "-O3", "-std=c++17", "-arch=compute_75", "-o"]);
        command.arg(Path::new(&out).join(name).with_extension("ptx")).arg(format!("{FOLDER}/{name}.cu"));
        let status = command.status().unwrap_or_else(|error| panic!("{}: {error}", nvcc.display()));
        assert!(status.success(), "{} {name}.cu: {status}", nvcc.display());
    }
}
