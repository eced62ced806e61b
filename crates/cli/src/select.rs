//! `longspan select`: which key blocks a selector chooses for recorded queries and keys, and what
//! attention over them drops.

use std::io::{Write, stdout};
use std::time::Instant;

use anyhow::Result;
use half::{bf16, f16};
use longspan::{
    Attention, BlockSelector, Dims, Element, ElementType, Heads, Hook, Inputs, KeptMass, LayoutSet,
    Options, Order, Padding, Selection, Selector, Shape, Sharing, Tensor,
};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use crate::args::Select;
use crate::choice;
use crate::compile::{self, BadInput};
use crate::element::with_element;
use crate::inspect::{Inspection, characters, write_files};
use crate::number::{percent, significant, thousands, time};
use crate::progress::Stage;

/// `longspan select`
pub(crate) fn run(args: &Select) -> Result<()> {
    let path = args.file.display();
    let stage = Stage::new(format!("reading {path}"));
    let bytes = std::fs::read(&args.file)
        .map_err(|error| BadInput(format!("can't read {path}: {error}")))?;
    let file = SafeTensors::deserialize(&bytes)
        .map_err(|error| BadInput(format!("{path} is no safetensors file: {error}")))?;
    let (q, k) = (Recorded::find(&file, &args.query)?, Recorded::find(&file, &args.key)?);
    drop(stage);
    if q.dtype != k.dtype {
        let (a, b) = (q.dtype, k.dtype);
        return Err(BadInput(format!(
            "{} holds {a} and {} {b}, expected the same element type",
            args.query, args.key
        ))
        .into());
    }
    with_element!(q.dtype, E => select::<E>(args, &q, &k))
}

/// A tensor of the file.
struct Recorded<'a> {
    view: TensorView<'a>,
    dtype: ElementType,
    dims: Dims,
}

impl<'a> Recorded<'a> {
    fn find(file: &SafeTensors<'a>, name: &str) -> Result<Self> {
        let Ok(view) = file.tensor(name) else {
            let names = file.names().join(", ");
            return Err(BadInput(format!(
                "the file has no tensor {name}, but {names}: name them with --query and --key"
            ))
            .into());
        };
        let dtype = match view.dtype() {
            Dtype::F32 => ElementType::F32,
            Dtype::BF16 => ElementType::Bf16,
            Dtype::F16 => ElementType::F16,
            other => {
                let rule = format!("{name} holds {other:?}, expected f32, bf16 or f16");
                return Err(BadInput(rule).into());
            }
        };
        let dims = match *view.shape() {
            [batch, heads, tokens, dim] => Dims { batch, tokens, heads, dim },
            [heads, tokens, dim] => Dims { batch: 1, tokens, heads, dim },
            ref shape => {
                let rule = "[batch, heads, tokens, dim] or [heads, tokens, dim]";
                return Err(
                    BadInput(format!("{name} has the shape {shape:?}, expected {rule}")).into()
                );
            }
        };
        Ok(Recorded { view, dtype, dims })
    }

    /// Its elements; every conversion is exact.
    fn tensor<E: Element>(&self) -> Result<Tensor<E>> {
        let data = self.view.data();
        let data: Vec<E> = match self.dtype {
            ElementType::F32 => {
                let read = |bytes: &[u8; 4]| E::from_f32(f32::from_le_bytes(*bytes));
                data.as_chunks().0.iter().map(read).collect()
            }
            ElementType::Bf16 => {
                let read = |bytes: &[u8; 2]| E::from_f32(bf16::from_le_bytes(*bytes).to_f32());
                data.as_chunks().0.iter().map(read).collect()
            }
            _ => {
                let read = |bytes: &[u8; 2]| E::from_f32(f16::from_le_bytes(*bytes).to_f32());
                data.as_chunks().0.iter().map(read).collect()
            }
        };
        Ok(Tensor::new(data, self.dims, Order::Bhsd)?)
    }
}

/// What is reported.
struct Report<'a> {
    args: &'a Select,
    q: &'a Recorded<'a>,
    k: &'a Recorded<'a>,
    selection: &'a Selection,
    /// Density of each query head, over all batch entries.
    by_head: Vec<f64>,
    kept: KeptMass,
    /// Seconds of the selection, and of attention over the choice.
    seconds: (f64, f64),
    inspection: Inspection,
}

fn select<E: Element>(args: &Select, q: &Recorded<'_>, k: &Recorded<'_>) -> Result<()> {
    let heads = q.dims.heads;
    for (option, value, limit) in
        [("--entry", Some(args.entry), q.dims.batch), ("--head", args.pictures.head, heads)]
    {
        if let Some(value) = value.filter(|&value| value >= limit) {
            let rule = format!("{option} is {value}, expected less than {limit}");
            return Err(BadInput(rule).into());
        }
    }
    let base = compile::patterns(&args.base)?;
    let selector = selector(args, &base)?;
    let (tensor_q, tensor_k) = (q.tensor::<E>()?, k.tensor::<E>()?);
    let (view_q, view_k) = (tensor_q.view(), tensor_k.view());

    let shape = args.block.of(Shape::new(q.dims.tokens, k.dims.tokens))?;
    let stage = Stage::new("selecting");
    let start = Instant::now();
    let padding = Padding::None(q.dims.batch);
    let selection = selector.select_with(view_q, view_k, &shape, &padding, Hook::none())?;
    let selecting = start.elapsed().as_secs_f64();
    drop(stage);

    let stage = Stage::new("measuring the kept mass");
    let attention = Attention::new(selection.layouts().clone()).options(options(args)?);
    let start = Instant::now();
    // Of the log-sum-exp, which values have no part in.
    let output = attention.forward(Inputs::new(view_q, view_k, view_k))?;
    let attending = start.elapsed().as_secs_f64();
    let kept = selection.kept_mass(view_q, view_k, &output.lse)?;
    let whole = LayoutSet::compile(&base, heads, &shape, &padding, None)?;
    let share =
        |head| blocks(selection.layouts(), head) as f64 / (blocks(&whole, head) as f64).max(1.0);
    let by_head = (0..heads).map(share).collect();
    drop(stage);

    let drawn = args.pictures.head;
    let inspection = Inspection::of_entry(selection.layouts(), args.entry, &base, drawn);
    let seconds = (selecting, attending);
    let report = Report { args, q, k, selection: &selection, by_head, kept, seconds, inspection };
    let files = write_files(&report.inspection, &args.pictures)?;
    let mut out = stdout().lock();
    if args.json {
        report.json(&mut out)?;
    } else {
        report.summary(&mut out)?;
        for (path, (width, height)) in files {
            writeln!(out, "wrote        {} ({width} × {height})", path.display())?;
        }
        if !args.pictures.no_picture {
            write!(out, "\n{}", characters(&report.inspection)?)?;
        }
    }
    out.flush()?;
    Ok(())
}

fn selector(args: &Select, base: &Heads) -> Result<BlockSelector> {
    let mut selector = BlockSelector::new(base.clone())
        .mass(args.mass)
        .block_mass(args.block_mass)
        .min_blocks(args.min_blocks)
        .max_blocks(args.max_blocks.unwrap_or(usize::MAX))
        .options(options(args)?);
    if let Some(always) = &args.always {
        selector = selector.always(always.parse()?);
    }
    if args.per_key_head {
        selector = selector.sharing(Sharing::PerKeyHead);
    }
    Ok(selector)
}

fn options(args: &Select) -> Result<Options> {
    let threads = choice::threads(args.threads)?.value.get();
    let options = Options::default().threads(threads).isa(choice::isa(args.isa)?.value);
    Ok(match args.scale {
        Some(scale) => options.scale(scale),
        None => options,
    })
}

/// Blocks of a head, over all batch entries.
fn blocks(set: &LayoutSet, head: usize) -> u64 {
    let each = (0..set.batch()).map(|entry| set.get(entry, head));
    let runs = each.flat_map(|layout| layout.rows().flat_map(|row| layout.row(row)));
    runs.map(|run| u64::from(run.len)).sum()
}

/// Shares of sampled queries whose kept mass is listed.
const QUANTILES: [f64; 3] = [0.01, 0.05, 0.5];

impl Report<'_> {
    fn summary(&self, out: &mut impl Write) -> Result<()> {
        let Report { args, q, k, kept, .. } = self;
        let shape = |dims: Dims| {
            let Dims { batch, tokens, heads, dim } = dims;
            format!("{batch} × {heads} heads × {} tokens × {dim}", thousands(tokens))
        };
        writeln!(out, "queries      {}, {}", shape(q.dims), q.dtype)?;
        writeln!(out, "keys         {}, {}", shape(k.dims), k.dtype)?;
        let (least, most) = least_and_most(&self.by_head);
        writeln!(
            out,
            "density      {} of the blocks of {}; by head {} to {}",
            percent(self.selection.density()),
            args.base,
            percent(least),
            percent(most),
        )?;
        let (low, high) = kept.interval;
        writeln!(
            out,
            "kept mass    {} of the attention mass (95 % interval {} to {})",
            percent(kept.mean),
            percent(low),
            percent(high),
        )?;
        let quantile = |share: f64| {
            let value = f64::from(kept.quantile(share).unwrap_or(1.0));
            format!("{} keep less than {}", percent(share), percent(value))
        };
        writeln!(out, "             of queries and heads {}", QUANTILES.map(quantile).join(", "))?;
        let (selecting, attending) = self.seconds;
        writeln!(
            out,
            "time         selection {}, {} of attention over the choice ({})",
            time(selecting),
            percent(selecting / attending),
            time(attending),
        )?;
        Ok(())
    }

    fn json(&self, out: &mut impl Write) -> Result<()> {
        let Report { args, q, k, kept, .. } = self;
        let shape = |dims: Dims| [dims.batch, dims.heads, dims.tokens, dims.dim];
        let quantiles = QUANTILES.map(|share| (significant(share), kept.quantile(share)));
        let report = serde_json::json!({
            "queries": shape(q.dims),
            "keys": shape(k.dims),
            "dtype": q.dtype.to_string(),
            "base": args.base,
            "density": self.selection.density(),
            "density_by_head": self.by_head,
            "kept_mass": kept.mean,
            "kept_mass_interval": [kept.interval.0, kept.interval.1],
            "kept_mass_quantiles": quantiles.into_iter().collect::<std::collections::BTreeMap<_, _>>(),
            "sampled": kept.sampled.len(),
            "selection_seconds": self.seconds.0,
            "attention_seconds": self.seconds.1,
        });
        writeln!(out, "{report}")?;
        Ok(())
    }
}

fn least_and_most(shares: &[f64]) -> (f64, f64) {
    let least = shares.iter().copied().fold(f64::INFINITY, f64::min);
    (least, shares.iter().copied().fold(0.0, f64::max))
}
