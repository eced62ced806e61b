//! Arguments that several classes and functions take: sizes, offsets, position maps, key ranges, tables.

use longspan::{BlockSize, Padding, Positions, Shape};
use longspan_pattern::Progression;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyRange, PyRangeMethods};

use crate::errors;

/// An integer, 0 or more.
pub(crate) struct Whole(pub(crate) u64);

impl<'py> FromPyObject<'_, 'py> for Whole {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match object.extract::<u64>() {
            Ok(value) if !object.is_instance_of::<PyBool>() => Ok(Whole(value)),
            _ if object.is_instance_of::<PyBool>() || object.extract::<i128>().is_err() => Err(
                errors::kind(format!("{}, expected an integer, 0 or more", described(&object)?)),
            ),
            _ => Err(errors::value(format!("an integer is {}, expected 0 to 2^64 − 1", &*object))),
        }
    }
}

/// A list of them: any sequence, or an array or tensor of one axis.
pub(crate) struct Wholes(pub(crate) Vec<u64>);

impl<'py> FromPyObject<'_, 'py> for Wholes {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let list = elements(&object)?;
        let Ok(items) = list.try_iter() else {
            return Err(errors::kind(format!(
                "{}, expected a list of integers, 0 or more",
                described(&object)?
            )));
        };
        let mut values = Vec::new();
        for (index, item) in items.enumerate() {
            let item = item?;
            let value = item.extract::<Whole>().map_err(|error| {
                let message = format!("element {index} is {}", error.value(object.py()));
                match error.is_instance_of::<pyo3::exceptions::PyTypeError>(object.py()) {
                    true => errors::kind(message),
                    false => error,
                }
            })?;
            values.push(value.0);
        }
        Ok(Wholes(values))
    }
}

/// An array's or a tensor's elements as Python's own lists and numbers; other objects as they are.
pub(crate) fn elements<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    match object.getattr_opt("tolist")? {
        Some(tolist) => tolist.call0(),
        None => Ok(object.clone()),
    }
}

/// A value that isn't what was expected, for a message: its type, and itself where that is short.
pub(crate) fn described(object: &Bound<'_, PyAny>) -> PyResult<String> {
    let kind = object.get_type().name()?.to_string();
    if object.is_none() {
        return Ok("None".into());
    }
    let text = object.repr()?.to_string();
    Ok(if text.chars().count() <= 40 { format!("{text}, a {kind}") } else { format!("a {kind}") })
}

/// Positions of the queries or keys at hand: integers, ranges, or a list of both.
pub(crate) struct Map(pub(crate) Positions);

impl<'py> FromPyObject<'_, 'py> for Map {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let mut parts: Vec<Progression> = Vec::new();
        if let Ok(range) = object.cast::<PyRange>() {
            parts.push(progression(&range)?);
        } else {
            let list = elements(&object)?;
            let Ok(items) = list.try_iter() else {
                return Err(errors::kind(format!(
                    "{}, expected positions: a list of integers, a range, or a list of ranges",
                    described(&object)?
                )));
            };
            // The last part grows as long as integers continue it.
            let mut open = false;
            for item in items {
                let item = item?;
                if let Ok(range) = item.cast::<PyRange>() {
                    parts.push(progression(range)?);
                    open = false;
                    continue;
                }
                let Ok(position) = item.extract::<i64>() else {
                    return Err(errors::kind(format!(
                        "an element is {}, expected an integer or a range",
                        described(&item)?
                    )));
                };
                match parts.last_mut() {
                    Some(part) if open && continues(part, position) => part.len += 1,
                    Some(part) if open && part.len == 1 && position > part.start => {
                        (part.step, part.len) = (position.abs_diff(part.start) as usize, 2);
                    }
                    _ => parts.push(Progression { start: position, step: 1, len: 1 }),
                }
                open = true;
            }
        }
        Positions::new(parts).map(Map).map_err(errors::raise_pattern)
    }
}

fn continues(part: &Progression, position: i64) -> bool {
    let next = i128::from(part.start) + part.step as i128 * part.len as i128;
    part.len > 1 && next == i128::from(position)
}

fn progression(range: &Bound<'_, PyRange>) -> PyResult<Progression> {
    let (start, step, len) = (range.start()?, range.step()?, range.len()?);
    match usize::try_from(step) {
        Ok(step) => Ok(Progression { start: start as i64, step, len }),
        Err(_) => Err(errors::value(format!(
            "a range has step {step}, expected 1 or more: give the positions in ascending parts"
        ))),
    }
}

/// The block size of a layout, and where its queries and keys stand.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct Placement {
    pub(crate) block: Option<u64>,
    pub(crate) query_offset: Option<i64>,
    pub(crate) key_offset: Option<i64>,
    pub(crate) query_map: Option<Positions>,
    pub(crate) key_map: Option<Positions>,
    pub(crate) mask_bytes: Option<u64>,
    pub(crate) max_work: Option<u64>,
}

impl Placement {
    pub(crate) fn shape(&self, tokens_q: usize, tokens_k: usize) -> PyResult<Shape> {
        let mut shape = Shape::new(tokens_q, tokens_k);
        if let Some(block) = self.block {
            shape = shape.block(BlockSize::new(block).map_err(errors::raise_pattern)?);
        }
        if let Some(offset) = self.query_offset {
            shape = shape.query_offset(offset);
        }
        if let Some(offset) = self.key_offset {
            shape = shape.key_offset(offset);
        }
        if let Some(positions) = &self.query_map {
            shape = shape.query_map(positions.clone());
        }
        if let Some(positions) = &self.key_map {
            shape = shape.key_map(positions.clone());
        }
        if let Some(bytes) = self.mask_bytes {
            shape = shape.mask_bytes(bytes);
        }
        if let Some(units) = self.max_work {
            shape = shape.max_work(units);
        }
        Ok(shape)
    }
}

pub(crate) fn pairs(ranges: Vec<(Whole, Whole)>) -> Vec<(usize, usize)> {
    ranges.into_iter().map(|(first, end)| (first.0 as usize, end.0 as usize)).collect()
}

/// The padding of so many batch entries, unless ranges count them.
pub(crate) fn padding(ranges: Option<Vec<(usize, usize)>>, batch: usize) -> Padding {
    match ranges {
        Some(ranges) => Padding::Each(ranges.iter().map(|&(first, end)| first..end).collect()),
        None => Padding::None(batch),
    }
}

/// A matrix of f32.
#[derive(Clone, PartialEq)]
pub(crate) struct Rows {
    pub(crate) values: Vec<f32>,
    pub(crate) columns: usize,
}

/// A matrix of numbers, as f32.
pub(crate) fn rows(value: &Bound<'_, PyAny>) -> PyResult<Rows> {
    let options = PyDict::new(value.py());
    options.set_item("dtype", "float32")?;
    let numpy = value.py().import("numpy")?;
    let array = numpy.call_method("ascontiguousarray", (value,), Some(&options))?;
    let shape: Vec<usize> = array.getattr("shape")?.extract()?;
    let [_, columns] = shape[..] else {
        return Err(errors::value(format!(
            "a table of shape {shape:?}, expected two axes: query heads, distances"
        )));
    };
    let bytes = array.call_method0("tobytes")?;
    let bytes = bytes.cast::<PyBytes>()?.as_bytes();
    let number = |bytes: &[u8]| f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    Ok(Rows { values: bytes.chunks_exact(4).map(number).collect(), columns })
}
