//! Trains a LongNet on the bytes of a text, to say what comes next.
//!
//! ```sh
//! examples/longnet/fetch text      # Perl's manual, from Debian's package perl-doc
//! cargo run --release -p longspan-candle --example longnet -- --directory run --steps 500 text/text.txt
//! examples/longnet/plot curve.png run
//! ```
//!
//! The same command goes on where it was stopped, be it by Ctrl-C or by `kill -9`, and makes the same
//! curve to the bit: a checkpoint has weights, moments and the number of steps, from which everything
//! else follows. `--attention` compares LongNet's branches with a window, with both, and with dense
//! attention, `--budget` at equal cost.
//!
//! candle keeps every result of the forward pass until the backward pass is done: the default model
//! takes 19 GB at a context of 64 k. It also allocates every result anew. With glibc, `MALLOC_MMAP_THRESHOLD_=17179869184
//! MALLOC_TRIM_THRESHOLD_=17179869184` in the environment keeps what was freed, and takes about a
//! fifth off the time of a step.

#![expect(clippy::print_stdout, reason = "it is what the example is for")]

mod adamw;
mod run;
mod settings;
mod text;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};
use candle_core::{DType, Tensor};
use candle_nn::{Module, VarMap, loss};
use clap::Parser;
use longspan_candle::longnet::{self, LongNetLM};
use longspan_candle::seeded;
use serde_json::Value;

use crate::adamw::AdamW;
use crate::run::{Line, Run};
use crate::settings::Settings;
use crate::text::{Batch, Text};

/// Trains a LongNet on the bytes of a text
#[derive(Debug, Parser)]
#[command(name = "longnet")]
struct Arguments {
    #[command(flatten)]
    settings: Settings,
    /// Where the training is kept; one that is there already goes on
    #[arg(long)]
    directory: PathBuf,
    /// Steps between checkpoints
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    checkpoint_every: u32,
    /// Files of text, read one after the other
    #[arg(required = true)]
    text: Vec<PathBuf>,
}

fn main() -> Result<()> {
    train(&Arguments::parse())
}

fn train(arguments: &Arguments) -> Result<()> {
    let Arguments { settings, directory, checkpoint_every, text } = arguments;
    let text = Text::read(text, settings.context, settings.validation)?;
    let config = settings.config()?;
    let vars = VarMap::new();
    let model = LongNetLM::new(&config, seeded(&vars, settings.seed, DType::F32))?;
    let mut optimizer = AdamW::new(&vars);

    let flops = settings.flops(&config)?;
    let total = settings.total(flops)?;
    let Value::Object(mut known) = serde_json::to_value(settings)? else {
        unreachable!("settings have names")
    };
    known.insert("text".into(), text.name().into());
    known.insert("flops_per_step".into(), flops.into());
    let (mut run, done) = Run::open(directory, &known, &mut optimizer)?;

    let weights: usize = vars.all_vars().iter().map(|var| var.elem_count()).sum();
    println!("{weights} weights, {:.1} GFLOP a step, steps {done} to {total}", flops / 1e9);
    let tokens = settings.context * settings.batch;
    let began = Instant::now();
    for step in done..total {
        let start = Instant::now();
        let batch = text.batch(settings.seed, step, settings.batch)?;
        let loss = nats(&model, &batch)?;
        let bits_per_byte = bits(&loss)?;
        let length = optimizer.step(&loss.backward()?, step, settings.rate(step, total))?;
        let seconds = start.elapsed().as_secs_f64();

        let last = step + 1 == total;
        let validation = ((step + 1).is_multiple_of(settings.validate_every) || last)
            .then(|| validate(&model, &text))
            .transpose()?;
        let read = (step + 1) * tokens;
        run.log(&Line { step, tokens: read, bits_per_byte, validation, seconds })?;
        if (step + 1).is_multiple_of(*checkpoint_every as usize) || last {
            run.checkpoint(&optimizer, step + 1)?;
        }

        let speed = tokens as f64 / seconds;
        let left = began.elapsed() / (step + 1 - done) as u32 * (total - step - 1) as u32;
        println!(
            "step {:>5} of {total}: {bits_per_byte:.4} bits a byte, gradient {length:.2}, \
             {speed:.0} tokens per second, {:.0} min left",
            step + 1,
            left.as_secs_f64() / 60.0
        );
        if let Some(validation) = validation {
            println!("validation: {validation:.4} bits a byte");
        }
    }
    longnet::save(run.model(), &config, &vars)?;
    println!("the model is in {}", run.model().display());
    Ok(())
}

/// The mean cross entropy of a batch.
fn nats(model: &LongNetLM, batch: &Batch) -> Result<Tensor> {
    let logits = model.forward(&batch.ids)?.flatten_to(1)?;
    Ok(loss::cross_entropy(&logits, &batch.targets.flatten_all()?)?)
}

fn bits(nats: &Tensor) -> Result<f64> {
    Ok(f64::from(nats.to_scalar::<f32>()?) / std::f64::consts::LN_2)
}

/// Bits a byte over all of the validation text.
fn validate(model: &LongNetLM, text: &Text) -> Result<f64> {
    let losses = text.validation().map(|batch| bits(&nats(model, &batch?)?));
    let losses = losses.collect::<Result<Vec<_>>>().context("validation")?;
    Ok(losses.iter().sum::<f64>() / losses.len() as f64)
}

#[cfg(test)]
mod tests;
