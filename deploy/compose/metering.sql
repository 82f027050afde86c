CREATE DATABASE wooly_metering;
