//! Tests as one program: candle is linked once.

mod cache;
#[path = "../common/mod.rs"]
mod common;
mod dense;
mod dilated;
mod learned;
mod lengths;
mod longnet;
mod modules;
mod refused;
mod reuse;
mod select;
mod views;
