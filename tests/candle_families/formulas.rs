//! Phi, Mamba and RWKV 5 written down once more, in f64 and straight from their formulas, one token after the other: what
//! candle-transformers, and our way of feeding it, are held to.

use super::checkpoints::{Checkpoint, HIDDEN, LAYERS, VOCAB};

type Row = Vec<f64>;

fn floats(checkpoint: &Checkpoint, name: &str) -> Row {
    checkpoint.tensor(name).iter().map(|&value| f64::from(value)).collect()
}

/// `weight . x`, and the bias where there is one.
fn linear(checkpoint: &Checkpoint, name: &str, x: &[f64]) -> Row {
    let weight = floats(checkpoint, &format!("{name}.weight"));
    let mut out: Row = weight.chunks(x.len()).map(|row| dot(row, x)).collect();
    let bias = format!("{name}.bias");
    if checkpoint.tensors.contains_key(&bias) {
        add(&mut out, &floats(checkpoint, &bias));
    }
    out
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// Mean 0 and variance 1 over each of `groups` equal parts, then the weights and the bias.
fn layer_norm(checkpoint: &Checkpoint, name: &str, x: &[f64], groups: usize, eps: f64) -> Row {
    let (weight, bias) =
        (floats(checkpoint, &format!("{name}.weight")), floats(checkpoint, &format!("{name}.bias")));
    let normal = x.chunks(x.len() / groups).flat_map(|part| {
        let mean = part.iter().sum::<f64>() / part.len() as f64;
        let variance = part.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / part.len() as f64;
        part.iter().map(move |x| (x - mean) / (variance + eps).sqrt()).collect::<Row>()
    });
    normal.zip(weight.iter().zip(&bias)).map(|(x, (weight, bias))| x * weight + bias).collect()
}

fn rms_norm(checkpoint: &Checkpoint, name: &str, x: &[f64]) -> Row {
    let square = dot(x, x) / x.len() as f64 + 1e-5;
    floats(checkpoint, &format!("{name}.weight")).iter().zip(x).map(|(w, x)| w * x / square.sqrt()).collect()
}

fn row(checkpoint: &Checkpoint, name: &str, token: u32) -> Row {
    floats(checkpoint, name)[token as usize * HIDDEN..][..HIDDEN].to_vec()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

fn gelu_new(x: f64) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
    0.5 * x * (1.0 + inner.tanh())
}

/// Turns the first `rotated` values of a head, pairs being (i, i + rotated / 2).
fn rope(head: &mut [f64], rotated: usize, position: usize) {
    for i in 0..rotated / 2 {
        let angle = position as f64 * 10_000f64.powf(-2.0 * i as f64 / rotated as f64);
        let (a, b) = (head[i], head[i + rotated / 2]);
        head[i] = a * angle.cos() - b * angle.sin();
        head[i + rotated / 2] = b * angle.cos() + a * angle.sin();
    }
}

/// Four query heads of 8 values, two for keys and values, half of each turned; attention and MLP in parallel.
pub fn phi(checkpoint: &Checkpoint, tokens: &[u32]) -> Vec<Row> {
    let mut caches = vec![(Vec::<Row>::new(), Vec::<Row>::new()); LAYERS];
    let logits = |(position, &token): (usize, &u32)| {
        let mut x = row(checkpoint, "model.embed_tokens.weight", token);
        for (layer, (keys, values)) in caches.iter_mut().enumerate() {
            let name = format!("model.layers.{layer}");
            let normal = layer_norm(checkpoint, &format!("{name}.input_layernorm"), &x, 1, 1e-5);
            let project = |part: &str| linear(checkpoint, &format!("{name}.self_attn.{part}"), &normal);
            let (mut q, mut k) = (project("q_proj"), project("k_proj"));
            q.chunks_mut(8).chain(k.chunks_mut(8)).for_each(|head| rope(head, 4, position));
            keys.push(k);
            values.push(project("v_proj"));
            let heads = q.chunks(8).enumerate().flat_map(|(head, q)| attend(q, keys, values, head / 2));
            let mixed: Row = heads.collect();
            let inner = linear(checkpoint, &format!("{name}.mlp.fc1"), &normal).into_iter().map(gelu_new);
            add(&mut x, &linear(checkpoint, &format!("{name}.self_attn.dense"), &mixed));
            add(&mut x, &linear(checkpoint, &format!("{name}.mlp.fc2"), &inner.collect::<Row>()));
        }
        linear(checkpoint, "lm_head", &layer_norm(checkpoint, "model.final_layernorm", &x, 1, 1e-5))
    };
    tokens.iter().enumerate().map(logits).collect()
}

fn attend(q: &[f64], keys: &[Row], values: &[Row], kv_head: usize) -> Row {
    let part = |row: &Row| row[kv_head * 8..][..8].to_vec();
    let scores: Row = keys.iter().map(|key| dot(q, &part(key)) / 8f64.sqrt()).collect();
    let most = scores.iter().copied().fold(f64::MIN, f64::max);
    let weights: Row = scores.iter().map(|score| (score - most).exp()).collect();
    let total: f64 = weights.iter().sum();
    let mut out = vec![0.0; 8];
    for (weight, value) in weights.iter().zip(values) {
        add(&mut out, &part(value).iter().map(|value| value * weight / total).collect::<Row>());
    }
    out
}

/// Gu and Dao 2023: a causal convolution of four taps, and a state of 16 values for each of 64 channels.
pub fn mamba(checkpoint: &Checkpoint, tokens: &[u32]) -> Vec<Row> {
    let mut states = vec![(vec![vec![0.0; 64]; 4], vec![[0.0; 16]; 64]); LAYERS];
    let logits = |&token: &u32| {
        let mut x = row(checkpoint, "backbone.embeddings.weight", token);
        for (layer, (window, state)) in states.iter_mut().enumerate() {
            let name = format!("backbone.layers.{layer}");
            let normal = rms_norm(checkpoint, &format!("{name}.norm"), &x);
            let both = linear(checkpoint, &format!("{name}.mixer.in_proj"), &normal);
            window.rotate_left(1);
            window[3] = both[..64].to_vec();
            let taps = floats(checkpoint, &format!("{name}.mixer.conv1d.weight"));
            let bias = floats(checkpoint, &format!("{name}.mixer.conv1d.bias"));
            let convolved =
                (0..64).map(|c| silu(bias[c] + (0..4).map(|t| taps[c * 4 + t] * window[t][c]).sum::<f64>()));
            let u: Row = convolved.collect();
            let projected = linear(checkpoint, &format!("{name}.mixer.x_proj"), &u);
            let (b, c) = (&projected[2..18], &projected[18..]);
            let steps = linear(checkpoint, &format!("{name}.mixer.dt_proj"), &projected[..2]);
            let a_log = floats(checkpoint, &format!("{name}.mixer.A_log"));
            let skip = floats(checkpoint, &format!("{name}.mixer.D"));
            let out = (0..64).map(|channel| {
                let step = steps[channel].exp().ln_1p();
                let cells = state[channel].iter_mut().enumerate();
                let y: f64 = cells
                    .map(|(n, h)| {
                        *h = *h * (-a_log[channel * 16 + n].exp() * step).exp() + step * b[n] * u[channel];
                        *h * c[n]
                    })
                    .sum();
                (y + skip[channel] * u[channel]) * silu(both[64 + channel])
            });
            let out: Row = out.collect();
            add(&mut x, &linear(checkpoint, &format!("{name}.mixer.out_proj"), &out));
        }
        let normal = rms_norm(checkpoint, "backbone.norm_f", &x);
        floats(checkpoint, "backbone.embeddings.weight").chunks(HIDDEN).map(|row| dot(row, &normal)).collect()
    };
    tokens.iter().map(logits).collect()
}

/// Peng et al. 2024 (Eagle): four heads of 8 values with a matrix each, whose result is divided by 8 before its norm.
pub fn rwkv5(checkpoint: &Checkpoint, tokens: &[u32]) -> Vec<Row> {
    let mut states = vec![(vec![0.0; HIDDEN], vec![0.0; HIDDEN], vec![[[0.0; 8]; 8]; 4]); LAYERS];
    let logits = |&token: &u32| {
        let x = row(checkpoint, "rwkv.embeddings.weight", token);
        let mut x = layer_norm(checkpoint, "rwkv.blocks.0.pre_ln", &x, 1, 1e-5);
        for (block, (before_mix, before_feed, matrices)) in states.iter_mut().enumerate() {
            let name = format!("rwkv.blocks.{block}");
            let normal = layer_norm(checkpoint, &format!("{name}.ln1"), &x, 1, 1e-5);
            let mixed = time_mix(checkpoint, &format!("{name}.attention"), &normal, before_mix, matrices);
            *before_mix = normal;
            add(&mut x, &mixed);
            let normal = layer_norm(checkpoint, &format!("{name}.ln2"), &x, 1, 1e-5);
            let name = format!("{name}.feed_forward");
            let shift =
                |part: &str| shifted(checkpoint, &format!("{name}.time_mix_{part}"), &normal, before_feed);
            let key = linear(checkpoint, &format!("{name}.key"), &shift("key"));
            let value = linear(
                checkpoint,
                &format!("{name}.value"),
                &key.iter().map(|key| key.max(0.0).powi(2)).collect::<Row>(),
            );
            let receptance = linear(checkpoint, &format!("{name}.receptance"), &shift("receptance"));
            let fed: Row = receptance.iter().zip(&value).map(|(r, value)| sigmoid(*r) * value).collect();
            *before_feed = normal;
            add(&mut x, &fed);
        }
        linear(checkpoint, "head", &layer_norm(checkpoint, "rwkv.ln_out", &x, 1, 1e-5))
    };
    tokens.iter().map(logits).collect()
}

/// Between this token and the one before, each channel by its own measure.
fn shifted(checkpoint: &Checkpoint, name: &str, now: &[f64], before: &[f64]) -> Row {
    let parts = floats(checkpoint, name);
    parts
        .iter()
        .zip(now.iter().zip(before))
        .map(|(part, (now, before))| now * part + before * (1.0 - part))
        .collect()
}

fn time_mix(
    checkpoint: &Checkpoint,
    name: &str,
    now: &[f64],
    before: &[f64],
    matrices: &mut [[[f64; 8]; 8]],
) -> Row {
    let project = |part: &str| {
        let input = shifted(checkpoint, &format!("{name}.time_mix_{part}"), now, before);
        linear(checkpoint, &format!("{name}.{part}"), &input)
    };
    let (r, k, v, gate) = (project("receptance"), project("key"), project("value"), project("gate"));
    let decay = floats(checkpoint, &format!("{name}.time_decay"));
    let bonus = floats(checkpoint, &format!("{name}.time_faaaa"));
    let mut out = vec![0.0; HIDDEN];
    for (head, matrix) in matrices.iter_mut().enumerate() {
        for (i, cells) in matrix.iter_mut().enumerate() {
            let at = head * 8 + i;
            for (j, cell) in cells.iter_mut().enumerate() {
                let new = k[at] * v[head * 8 + j];
                out[head * 8 + j] += r[at] * (bonus[at] * new + *cell);
                *cell = new + (-decay[at].exp()).exp() * *cell;
            }
        }
    }
    out.iter_mut().for_each(|out| *out /= 8.0);
    let normal = layer_norm(checkpoint, &format!("{name}.ln_x"), &out, 4, 1e-5);
    let gated: Row = normal.iter().zip(&gate).map(|(x, gate)| x * silu(*gate)).collect();
    assert_eq!(VOCAB, checkpoint.tensors["head.weight"].0[0]);
    linear(checkpoint, &format!("{name}.output"), &gated)
}
