//! The models: `docs/longnet-weights.md` written out in f64, with masks, and what must follow from
//! it.

use std::collections::{BTreeMap, HashMap};

use crate::common::numbers;
use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::{Module, VarMap};
use longspan_candle::longnet::{self, AttentionConfig, Config, LongNetEncoder, LongNetLM};
use longspan_candle::longspan::Overlap;
use longspan_candle::{Positions, seeded};
use longspan_testing::{assert_close, largest_difference};

const DOCUMENT: &str = include_str!("../../../../docs/longnet-weights.md");

fn small(attention: AttentionConfig) -> Config {
    Config {
        vocab_size: 19,
        hidden_size: 24,
        num_hidden_layers: 2,
        num_attention_heads: 3,
        intermediate_size: 40,
        attention,
        ..Config::default()
    }
}

fn dilated() -> AttentionConfig {
    AttentionConfig::dilated([8, 20, 50], [1, 2, 3])
}

fn pattern(text: &str) -> AttentionConfig {
    AttentionConfig::Pattern(text.parse().unwrap())
}

fn ids(tokens: usize) -> Result<Tensor> {
    let ids: Vec<u32> =
        (0..2 * tokens as u32).map(|n| n.wrapping_mul(2_654_435_761) % 19).collect();
    Tensor::from_vec(ids, (2, tokens), &Device::Cpu)
}

/// Weights of which no two are alike, biases and norms too.
fn weights(config: &Config) -> Result<(VarMap, LongNetLM)> {
    let vars = VarMap::new();
    let model = LongNetLM::new(config, seeded(&vars, 3, DType::F32))?;
    for (name, var) in vars.data().lock().unwrap().iter() {
        if name.ends_with("bias") || name.contains("norm") || name.contains("_ln") {
            let count = var.elem_count();
            let seed = name.bytes().map(u64::from).sum();
            let noise = crate::common::random(seed, (1, 1, 1, count))?.reshape(count)?;
            var.set(&(var.as_tensor() + (noise * 0.2)?)?)?;
        }
    }
    Ok((vars, model))
}

/// The document's arithmetic in f64.
struct Reference<'a> {
    config: &'a Config,
    weights: HashMap<String, Var>,
}

impl<'a> Reference<'a> {
    fn new(config: &'a Config, vars: &VarMap) -> Result<Self> {
        let vars = vars.data().lock().unwrap();
        let wide = |(name, var): (&String, &Var)| {
            Ok((name.clone(), Var::from_tensor(&var.to_dtype(DType::F64)?)?))
        };
        Ok(Reference { config, weights: vars.iter().map(wide).collect::<Result<_>>()? })
    }

    fn weight(&self, name: &str) -> &Tensor {
        self.weights[name].as_tensor()
    }

    fn linear(&self, name: &str, x: &Tensor) -> Result<Tensor> {
        let weight = self.weight(&format!("{name}.weight")).t()?;
        let y = x.broadcast_matmul(&weight)?;
        match self.weights.get(&format!("{name}.bias")) {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }

    fn norm(&self, name: &str, x: &Tensor) -> Result<Tensor> {
        let x = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
        let variance = x.sqr()?.mean_keepdim(D::Minus1)?;
        let x = x.broadcast_div(&(variance + self.config.layer_norm_eps)?.sqrt()?)?;
        x.broadcast_mul(self.weight(&format!("{name}.weight")))?
            .broadcast_add(self.weight(&format!("{name}.bias")))
    }

    /// `(batch, tokens, heads, d)`.
    fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        let Positions::Rotary { base } = self.config.positions else { return Ok(x.clone()) };
        let (_, tokens, _, d) = x.dims4()?;
        let angle = |n: usize, j: usize| n as f64 * base.powf(-2.0 * j as f64 / d as f64);
        let table = |of: fn(f64) -> f64| {
            let numbers = (0..tokens).flat_map(|n| (0..d / 2).map(move |j| of(angle(n, j))));
            Tensor::from_vec(numbers.collect::<Vec<_>>(), (1, tokens, 1, d / 2), &Device::Cpu)
        };
        let (cos, sin) = (table(f64::cos)?, table(f64::sin)?);
        let (low, high) = (x.narrow(3, 0, d / 2)?, x.narrow(3, d / 2, d / 2)?);
        let left = (low.broadcast_mul(&cos)? - high.broadcast_mul(&sin)?)?;
        let right = (high.broadcast_mul(&cos)? + low.broadcast_mul(&sin)?)?;
        Tensor::cat(&[left, right], 3)
    }

    /// How often each head's queries count each key, `(1, heads, tokens, tokens)`.
    fn counts(&self, tokens: usize, times: &dyn Fn(usize, usize, usize) -> f64) -> Result<Tensor> {
        let heads = self.config.num_attention_heads;
        let mut counts = Vec::new();
        for (head, query) in (0..heads).flat_map(|h| (0..tokens).map(move |q| (h, q))) {
            counts.extend((0..tokens).map(|key| times(head, query, key)));
        }
        Tensor::from_vec(counts, (1, heads, tokens, tokens), &Device::Cpu)
    }

    fn attention(&self, layer: &str, x: &Tensor, counts: &Tensor) -> Result<Tensor> {
        let (batch, tokens, hidden) = x.dims3()?;
        let heads = self.config.num_attention_heads;
        let split = |name: &str| {
            let x = self.linear(&format!("{layer}.self_attn.{name}"), x)?;
            x.reshape((batch, tokens, heads, hidden / heads))
        };
        let lay = |x: Tensor| x.transpose(1, 2)?.contiguous();
        let q = lay(self.rotate(&split("q_proj")?)?)?;
        let k = lay(self.rotate(&split("k_proj")?)?)?;
        let v = lay(split("v_proj")?)?;
        let scores = (q.matmul(&k.t()?)? / ((hidden / heads) as f64).sqrt())?;
        let seen = scores.exp()?.broadcast_mul(counts)?;
        let out = seen.broadcast_div(&seen.sum_keepdim(D::Minus1)?)?.matmul(&v)?;
        let out = out.transpose(1, 2)?.reshape((batch, tokens, hidden))?;
        let out = self.norm(&format!("{layer}.self_attn.inner_attn_ln"), &out)?;
        self.linear(&format!("{layer}.self_attn.out_proj"), &out)
    }

    fn logits(&self, ids: &Tensor, times: &dyn Fn(usize, usize, usize) -> f64) -> Result<Tensor> {
        let (batch, tokens) = ids.dims2()?;
        let counts = self.counts(tokens, times)?;
        let x = self.weight("embed_tokens.weight").index_select(&ids.flatten_all()?, 0)?;
        let mut x = x.reshape((batch, tokens, self.config.hidden_size))?;
        for index in 0..self.config.num_hidden_layers {
            let layer = format!("layers.{index}");
            let y = self.norm(&format!("{layer}.self_attn_layer_norm"), &x)?;
            x = (x + self.attention(&layer, &y, &counts)?)?;
            let y = self.norm(&format!("{layer}.final_layer_norm"), &x)?;
            let y = self.linear(&format!("{layer}.ffn.fc1"), &y)?;
            let y = ((&y * 0.5)? * ((&y / 2_f64.sqrt())?.erf()? + 1.0)?)?;
            let y = self.norm(&format!("{layer}.ffn.ffn_layernorm"), &y)?;
            x = (x + self.linear(&format!("{layer}.ffn.fc2"), &y)?)?;
        }
        self.linear("output_projection", &self.norm("layer_norm", &x)?)
    }
}

/// How far a number of the model may be off, as a share of the largest of its tensor. Numbers go
/// through some twelve operations per layer, each off by a few units of 2⁻²⁴ times what its sums of up
/// to 40 terms lose; norms divide by deviations near 1. Measured: 4e-7 for logits, 1.4e-6 for
/// gradients, which go back through all of it.
const LOGITS: f64 = 4e-6;
const GRADIENTS: f64 = 2e-5;

/// Logits and the gradients of every weight.
fn check(config: &Config, times: &dyn Fn(usize, usize, usize) -> f64) -> Result<()> {
    let ids = ids(61)?;
    let (vars, model) = weights(config)?;
    let reference = Reference::new(config, &vars)?;
    let (found, expected) = (model.forward(&ids)?, reference.logits(&ids, times)?);
    close("logits", &found, &expected, LOGITS)?;

    let factors = crate::common::random(9, (1, 2, 61, 19))?.squeeze(0)?;
    let found = (found * &factors)?.sum_all()?.backward()?;
    let expected = (expected * factors.to_dtype(DType::F64)?)?.sum_all()?.backward()?;
    let vars = vars.data().lock().unwrap();
    assert_eq!(vars.len(), 20 * config.num_hidden_layers + 4);
    for (name, var) in vars.iter() {
        let found = found.get(var).unwrap_or_else(|| panic!("no gradient for {name}"));
        let expected = expected.get(&reference.weights[name]).expect("a gradient");
        if name.ends_with("k_proj.bias") && config.positions == Positions::None {
            // It moves all scores of a query alike: 0, and what rounding makes of terms near 1, in
            // f64 by 2⁻²⁹ of what it makes in f32. Measured: 4e-6 and 5e-15.
            let zeros = vec![0.0; found.elem_count()];
            assert_close(name, &numbers(found)?, &zeros, GRADIENTS);
            assert_close(name, &numbers(expected)?, &zeros, GRADIENTS * 2_f64.powi(-29));
            continue;
        }
        close(name, found, expected, GRADIENTS)?;
    }
    Ok(())
}

fn largest(numbers: &[f64]) -> f64 {
    largest_difference(numbers, &vec![0.0; numbers.len()])
}

fn close(name: &str, found: &Tensor, expected: &Tensor, share: f64) -> Result<()> {
    assert_eq!(found.dims(), expected.dims(), "{name}");
    let (found, expected) = (numbers(found)?, numbers(expected)?);
    let most = largest(&expected);
    assert!(most > 0.0, "{name} is 0");
    assert_close(name, &found, &expected, share * most);
    Ok(())
}

#[test]
fn the_document_written_out_dilated() -> Result<()> {
    let branches = [(8, 1), (20, 2), (50, 3)];
    let times = |head: usize, query: usize, key: usize| {
        let has = |position: usize, w: usize, r: usize| position % w % r == head % r;
        let seen = branches.iter().filter(|&&(w, r)| {
            key <= query && query / w == key / w && has(query, w, r) && has(key, w, r)
        });
        seen.count() as f64
    };
    check(&small(dilated()), &times)
}

/// One pattern per head; both ways in the configuration, causal in the model.
#[test]
fn the_document_written_out_patterns() -> Result<()> {
    let times = |head: usize, query: usize, key: usize| {
        let near = query.abs_diff(key) <= 5;
        let seen = match head {
            0 => near,
            1 => true,
            _ => near || key < 2,
        };
        f64::from(u8::from(seen && key <= query))
    };
    let patterns = pattern("heads([window(5, 5), full, window(5, 5) | sinks(2)])");
    check(&small(patterns.clone()), &times)?;
    check(&Config { positions: Positions::None, ..small(patterns) }, &times)
}

/// No logit depends on a later id; all later ones may.
#[test]
fn nothing_leaks_back() -> Result<()> {
    for attention in [dilated(), pattern("full"), pattern("window(9, 9)")] {
        let config = small(attention);
        let (_, model) = weights(&config)?;
        let tokens = 61;
        let before = ids(tokens)?;
        let logits = |ids: &Tensor| model.forward(ids)?.get(0)?.to_vec2::<f32>();
        let expected = logits(&before)?;
        for changed in [0, 1, 17, 20, 59, 60] {
            let mut other = before.to_vec2::<u32>()?;
            other[0][changed] = (other[0][changed] + 7) % 19;
            let found = logits(&Tensor::new(other, &Device::Cpu)?)?;
            assert_eq!(found[..changed], expected[..changed], "{config:?}");
            assert_ne!(found[changed], expected[changed], "{config:?}");
        }
    }
    Ok(())
}

/// The encoder isn't cut: every vector depends on a later one that it sees.
#[test]
fn the_encoder_sees_both_ways() -> Result<()> {
    let config = small(dilated());
    let encoder = LongNetEncoder::new(&config, seeded(&VarMap::new(), 5, DType::F32))?;
    let x = crate::common::random(1, (1, 1, 61, 24))?.squeeze(0)?;
    let rows = |x: &Tensor| encoder.forward(x)?.get(0)?.to_vec2::<f32>();
    let mut other = x.to_vec3::<f32>()?;
    other[0][7][3] += 1.0;
    let (before, after) = (rows(&x)?, rows(&Tensor::new(other, &Device::Cpu)?)?);
    assert_ne!(before[0], after[0]);
    assert_eq!(before.len(), 61);
    Ok(())
}

fn directory(name: &str) -> std::path::PathBuf {
    std::env::temp_dir().join(format!("longspan-{name}-{}", std::process::id()))
}

#[test]
fn saved_and_loaded() -> Result<()> {
    let at = directory("saved");
    let config = small(dilated());
    let (vars, model) = weights(&config)?;
    longnet::save(&at, &config, &vars)?;
    let (read, again) = LongNetLM::load(&at, DType::F32)?;
    assert_eq!(read, config);
    let ids = ids(40)?;
    assert_eq!(numbers(&model.forward(&ids)?)?, numbers(&again.forward(&ids)?)?);

    // In bf16 it is the same model: twelve operations in each of two layers, each of which rounds by
    // up to 2⁻⁸ of its result, are 24 / 256, less than a tenth.
    let (_, coarse) = LongNetLM::load(&at, DType::BF16)?;
    let (fine, coarse) = (numbers(&model.forward(&ids)?)?, coarse.forward(&ids)?);
    assert_eq!(coarse.dtype(), DType::BF16);
    assert_close("logits in bf16", &numbers(&coarse)?, &fine, 0.1 * largest(&fine));

    // An encoder has no use for the embedding, and says so.
    let message = LongNetEncoder::load(&at, DType::F32).unwrap_err().to_string();
    assert!(message.contains("embed_tokens.weight") && message.contains("2 tensors"), "{message}");
    // Another size doesn't fit, a layer more isn't there.
    for other in [
        Config { intermediate_size: 41, ..config.clone() },
        Config { num_hidden_layers: 3, ..config.clone() },
    ] {
        longnet::save(&at, &other, &vars)?;
        let message = LongNetLM::load(&at, DType::F32).unwrap_err().to_string();
        assert!(message.contains("fc1") || message.contains("layers.2."), "{message}");
    }
    std::fs::remove_dir_all(&at)?;
    Ok(())
}

/// Names and shapes are those of the document's table.
#[test]
fn the_documents_names() -> Result<()> {
    let config = small(dilated());
    let sizes = HashMap::from([
        ("h", config.hidden_size),
        ("f", config.intermediate_size),
        ("v", config.vocab_size),
    ]);
    let mut expected = [BTreeMap::new(), BTreeMap::new()];
    for line in DOCUMENT.lines().filter(|line| line.starts_with("| `") && line.contains("✓")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let code = |cell: &str| -> Vec<String> {
            cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
        };
        let mut names = code(cells[0]);
        if let [first, second] = &mut names[..] {
            *second = first.replace(".weight", second);
        }
        let shapes = code(cells[1]);
        for (index, name) in names.iter().enumerate() {
            let shape = shapes[index.min(shapes.len() - 1)].trim_matches(['[', ']']);
            let shape: Vec<usize> = shape.split(", ").map(|size| sizes[size]).collect();
            for layer in 0..config.num_hidden_layers {
                let name = name.replace("{i}", &layer.to_string());
                for (expected, cell) in expected.iter_mut().zip(&cells[2..]) {
                    if *cell == "✓" {
                        expected.insert(name.clone(), shape.clone());
                    }
                }
            }
        }
    }
    let found = |vars: VarMap| -> BTreeMap<String, Vec<usize>> {
        let vars = vars.data().lock().unwrap();
        vars.iter().map(|(name, var)| (name.clone(), var.dims().to_vec())).collect()
    };
    let (encoder, model) = (VarMap::new(), VarMap::new());
    LongNetEncoder::new(&config, seeded(&encoder, 1, DType::F32))?;
    LongNetLM::new(&config, seeded(&model, 1, DType::F32))?;
    assert_eq!(expected, [found(encoder), found(model)]);
    Ok(())
}

/// Deviations of the document's table, and means of 0. Of `n` normal numbers the deviation is off by
/// `1/√(2n)` of itself, mostly; five times that never.
#[test]
fn weights_begin_as_documented() -> Result<()> {
    let config = Config {
        hidden_size: 64,
        intermediate_size: 128,
        num_attention_heads: 4,
        vocab_size: 100,
        ..small(dilated())
    };
    let vars = VarMap::new();
    LongNetLM::new(&config, seeded(&vars, 1, DType::F32))?;
    let gain = (2.0 * config.num_hidden_layers as f64).ln().sqrt();
    let xavier = |sum: usize| (2.0 / sum as f64).sqrt();
    for (name, var) in vars.data().lock().unwrap().iter() {
        let part = name.trim_end_matches(".weight").rsplit('.').next().unwrap_or_default();
        let numbers = numbers(var)?;
        let expected = match part {
            "q_proj" | "k_proj" => xavier(128),
            "v_proj" | "out_proj" => gain * xavier(128),
            "fc1" | "fc2" => gain * xavier(192),
            "embed_tokens" | "output_projection" => 0.125,
            "bias" => {
                assert!(numbers.iter().all(|x| *x == 0.0), "{name}");
                continue;
            }
            _ => {
                assert!(numbers.iter().all(|x| *x == 1.0), "{name}");
                continue;
            }
        };
        let n = numbers.len() as f64;
        let mean = numbers.iter().sum::<f64>() / n;
        let deviation = (numbers.iter().map(|x| x * x).sum::<f64>() / n).sqrt();
        assert!(mean.abs() < 5.0 * expected / n.sqrt(), "{name}: mean {mean}");
        let off = (deviation / expected - 1.0).abs();
        assert!(off < 5.0 / (2.0 * n).sqrt(), "{name}: {deviation}, expected {expected}");
    }
    Ok(())
}

#[test]
fn seeds() -> Result<()> {
    let logits = |seed| {
        let model = LongNetLM::new(&small(dilated()), seeded(&VarMap::new(), seed, DType::F32))?;
        numbers(&model.forward(&ids(9)?)?)
    };
    assert_eq!(logits(1)?, logits(1)?);
    assert_ne!(logits(1)?, logits(2)?);
    Ok(())
}

/// The document's JSON is the default; any configuration survives JSON.
#[test]
fn configurations() {
    let json = DOCUMENT.split("```json").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    assert_eq!(serde_json::from_str::<Config>(json).unwrap(), Config::default());
    assert_eq!(serde_json::from_str::<Config>("{}").unwrap(), Config::default());
    let heads = pattern("heads([causal, full, window(3, 3) & !sinks(1)])");
    let both =
        r#"{"segment_lengths":[8],"dilation_rates":[2],"also":"window(3, 0)","counting":"once"}"#;
    let both = format!(r#"{{"attention":{{"dilated":{both}}}}}"#);
    let window: Config = serde_json::from_str(&both).unwrap();
    let renamed = both.replace("counting", "overlap").replace("once", "union");
    assert_eq!(serde_json::from_str::<Config>(&renamed).unwrap(), window);
    let AttentionConfig::Dilated { also, overlap, .. } = &window.attention else { panic!() };
    assert_eq!((also, *overlap), (&Some("window(3, 0)".parse().unwrap()), Overlap::Union));
    for config in [
        window,
        Config::default(),
        Config { positions: Positions::None, layer_norm_eps: 1e-6, ..small(heads) },
    ] {
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<Config>(&text).unwrap(), config);
    }
    for (text, part) in [
        (r#"{"hidden": 3}"#, "hidden"),
        (r#"{"positions": {"rotary": {"base": 10.0, "scale": 2}}}"#, "scale"),
        (r#"{"attention": {"dilated": {"segment_lengths": [8]}}}"#, "dilation_rates"),
        (r#"{"attention": {"pattern": "casual"}}"#, "causal"),
    ] {
        let message = serde_json::from_str::<Config>(text).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn refused() -> Result<()> {
    let make = |config: &Config| {
        let model = LongNetLM::new(config, seeded(&VarMap::new(), 1, DType::F32));
        model.map(|_| ()).unwrap_err().to_string()
    };
    let base = || small(dilated());
    let branches =
        |segments: &[u64], rates: &[u64]| small(AttentionConfig::dilated(segments, rates));
    for (config, parts) in [
        (Config { num_attention_heads: 5, ..base() }, ["24", "5 heads"]),
        (Config { num_attention_heads: 0, ..base() }, ["24", "0 heads"]),
        (Config { num_attention_heads: 8, ..base() }, ["head dim of 3", "even"]),
        (Config { num_hidden_layers: 0, ..base() }, ["num_hidden_layers is 0", "1"]),
        (Config { vocab_size: 0, ..base() }, ["vocab_size is 0", "1"]),
        (Config { layer_norm_eps: 0.0, ..base() }, ["layer_norm_eps is 0", "over 0"]),
        (
            Config { positions: Positions::Rotary { base: f64::NAN }, ..base() },
            ["base NaN", "finite"],
        ),
        (branches(&[8, 16], &[1]), ["2 segment_lengths", "1 dilation_rates"]),
        (branches(&[], &[]), ["branch", ""]),
        (branches(&[8], &[0]), ["0", "rate"]),
        (small(pattern("heads([causal, full])")), ["patterns for 2 heads", "expected 3"]),
    ] {
        let message = make(&config);
        for part in parts {
            assert!(message.contains(part), "{message}: expected {part:?}");
        }
    }
    let (_, model) = weights(&base())?;
    for wrong in [Tensor::zeros((1, 4), DType::F32, &Device::Cpu)?, ids(5)?.flatten_all()?] {
        let message = model.forward(&wrong).unwrap_err().to_string();
        assert!(message.contains("expected whole numbers, (batch, tokens)"), "{message}");
    }
    let beyond = Tensor::new(&[[19_u32]], &Device::Cpu)?;
    assert!(model.forward(&beyond).is_err());
    let encoder = LongNetEncoder::new(&base(), seeded(&VarMap::new(), 1, DType::F32))?;
    let message = encoder.forward(&ids(5)?).unwrap_err().to_string();
    assert!(message.contains("(batch, tokens, 24)"), "{message}");
    Ok(())
}
