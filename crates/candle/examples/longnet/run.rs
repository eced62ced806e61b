//! The directory of a training: what it was told, where it is, what it has seen.
//!
//! | file | what |
//! |---|---|
//! | `run.json` | the settings; a resumed training must have the same |
//! | `checkpoint.safetensors` | weights, moments, the number of steps done |
//! | `losses.csv` | one line per step |
//! | `model/` | the model, once it is done |
//!
//! A file is written beside its place and moved there, so it is the old one or the new one, whole,
//! whenever the process is killed. Lines of `losses.csv` are appended; what a resumed training will
//! do again is cut off first.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use candle_core::{Device, Tensor};
use serde_json::{Map, Value};

use crate::adamw::AdamW;

const HEADER: &str = "step,tokens,bits_per_byte,validation,seconds";
/// The name of the number of steps in a checkpoint.
const STEPS: &str = "steps";

/// A line of `losses.csv`.
pub(crate) struct Line {
    pub(crate) step: usize,
    /// Bytes read so far.
    pub(crate) tokens: usize,
    pub(crate) bits_per_byte: f64,
    pub(crate) validation: Option<f64>,
    pub(crate) seconds: f64,
}

pub(crate) struct Run {
    directory: PathBuf,
    losses: File,
}

impl Run {
    /// Begins a training, or goes on with the one that is there; returns the steps that are done.
    pub(crate) fn open(
        directory: &Path,
        settings: &Map<String, Value>,
        optimizer: &mut AdamW,
    ) -> Result<(Self, usize)> {
        std::fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
        let path = directory.join("run.json");
        if path.exists() {
            let text = std::fs::read_to_string(&path)?;
            let before: Map<String, Value> =
                serde_json::from_str(&text).with_context(|| path.display().to_string())?;
            same(&before, settings).with_context(|| path.display().to_string())?;
        } else {
            replace(&path, |file| {
                file.write_all(serde_json::to_string_pretty(settings)?.as_bytes())?;
                Ok(())
            })?;
        }
        let steps = restore(&directory.join("checkpoint.safetensors"), optimizer)?;
        let losses = directory.join("losses.csv");
        keep(&losses, steps).with_context(|| losses.display().to_string())?;
        let losses = OpenOptions::new().append(true).open(&losses)?;
        Ok((Run { directory: directory.to_owned(), losses }, steps))
    }

    /// Appends a line.
    pub(crate) fn log(&mut self, line: &Line) -> Result<()> {
        let Line { step, tokens, bits_per_byte, validation, seconds } = line;
        // As many digits as it takes to read the same number again.
        let validation = validation.map_or(String::new(), |bits| bits.to_string());
        let text = format!("{step},{tokens},{bits_per_byte},{validation},{seconds:.3}\n");
        self.losses.write_all(text.as_bytes())?;
        Ok(())
    }

    /// Writes down where the training is.
    pub(crate) fn checkpoint(&mut self, optimizer: &AdamW, steps: usize) -> Result<()> {
        // Lines before the checkpoint that says that they are there.
        self.losses.sync_all()?;
        let mut state = optimizer.state()?;
        state.insert(STEPS.to_owned(), Tensor::new(&[steps as i64], &Device::Cpu)?);
        let path = self.directory.join("checkpoint.safetensors");
        let beside = beside(&path);
        candle_core::safetensors::save(&state, &beside)?;
        File::open(&beside)?.sync_all()?;
        put(&beside, &path)
    }

    /// Where the model goes.
    pub(crate) fn model(&self) -> PathBuf {
        self.directory.join("model")
    }
}

/// Refuses other settings than those of before.
fn same(before: &Map<String, Value>, now: &Map<String, Value>) -> Result<()> {
    let names = before.keys().chain(now.keys());
    for name in names {
        let (before, now) = (before.get(name), now.get(name));
        if before != now {
            let show = |value: Option<&Value>| value.map_or("nothing".into(), Value::to_string);
            bail!(
                "this training has {name} = {}, asked for {}: another training needs another \
                 directory",
                show(before),
                show(now)
            )
        }
    }
    Ok(())
}

fn restore(path: &Path, optimizer: &mut AdamW) -> Result<usize> {
    if !path.exists() {
        return Ok(0);
    }
    let mut read = || {
        let state = candle_core::safetensors::load(path, &Device::Cpu)?;
        optimizer.restore(&state)?;
        let steps = state.get(STEPS).context("no number of steps")?.to_vec1::<i64>()?;
        ensure!(steps.len() == 1 && steps[0] >= 0, "{steps:?} steps");
        Ok(steps[0] as usize)
    };
    read().with_context(|| path.display().to_string())
}

/// Leaves the lines of the steps that are done, and no others.
fn keep(path: &Path, steps: usize) -> Result<()> {
    let before = if path.exists() { std::fs::read_to_string(path)? } else { String::new() };
    let lines: Vec<&str> = before.lines().skip(1).take(steps).collect();
    ensure!(lines.len() == steps, "{} lines, expected one for each of {steps} steps", lines.len());
    for (step, line) in lines.iter().enumerate() {
        ensure!(line.starts_with(&format!("{step},")), "{line:?} in place of step {step}");
    }
    replace(path, |file| {
        writeln!(file, "{HEADER}")?;
        lines.iter().try_for_each(|line| writeln!(file, "{line}"))?;
        Ok(())
    })
}

/// Writes a file beside its place, and moves it there.
fn replace(path: &Path, write: impl FnOnce(&mut File) -> Result<()>) -> Result<()> {
    let beside = beside(path);
    let mut file = File::create(&beside)?;
    write(&mut file)?;
    file.sync_all()?;
    put(&beside, path)
}

fn beside(path: &Path) -> PathBuf {
    path.with_extension("new")
}

/// Moves a file to its place, and has the directory know it before anything else happens.
fn put(from: &Path, to: &Path) -> Result<()> {
    std::fs::rename(from, to)?;
    let directory = to.parent().context("a file has a directory")?;
    File::open(directory)?.sync_all()?;
    Ok(())
}
